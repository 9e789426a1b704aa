"""A fit on its way: progress, checkpoints, the learning curve, and a judgement now and then."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coppice.settings import Settings
from drafter_svc.building import build_drafter
from training.acceptance import acceptance
from training.curve import CURVE_FILE, Curve
from training.dataset import Sample
from training.kinds import Kind, Target
from training.trainer import StepReport, Trainer

CHECKPOINT_FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often a run looks up from its work."""

    report_steps: int = 20
    checkpoint_seconds: float = 300.0
    judge_seconds: float = 900.0
    nodes: int = 15  # of the trees that it is judged with


class Run:
    """A trainer with all that is written on its way."""

    def __init__(
        self,
        trainer: Trainer,
        kind: Kind,
        target: Target,
        output: Path,
        judged: Settings,
        held_out: Sequence[Sample],
        rhythm: Rhythm,
    ) -> None:
        self._trainer = trainer
        self._output = output
        self._kind = kind
        self._target = target
        self._judged = judged
        self._held_out = held_out
        self._rhythm = rhythm
        self._curve = Curve(output / CURVE_FILE, trainer.done)
        self._tokens = int(float(self._curve.last.get("tokens", 0)))
        self._seconds = float(self._curve.last.get("seconds", 0.0))

    def to_the_end(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        reports: list[StepReport] = []
        saved = judged = time.monotonic()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(
                "steps", total=self._trainer.steps, completed=self._trainer.done, shown=""
            )
            before = time.monotonic()
            for report in self._trainer.run():
                reports.append(report)
                now = time.monotonic()
                progress.advance(task)
                if len(reports) == self._rhythm.report_steps:
                    shown = self._report(reports, now - before)
                    progress.update(task, shown=shown)
                    reports, before = [], now
                if now - judged > self._rhythm.judge_seconds:
                    self._judge(console)
                    judged = before = time.monotonic()
                if now - saved > self._rhythm.checkpoint_seconds:
                    self._trainer.save(self._output / CHECKPOINT_FILE)
                    saved = time.monotonic()
            if reports:
                self._report(reports, time.monotonic() - before)
        self._trainer.save(self._output / CHECKPOINT_FILE)
        self._judge(console)
        self._curve.draw(self._output / "curve.png")

    def _report(self, reports: Sequence[StepReport], seconds: float) -> str:
        tokens = sum(report.tokens for report in reports)
        self._tokens += tokens
        self._seconds += seconds
        losses = [report.losses for report in reports]
        loss = fmean(float(each.total.detach()) for each in losses)
        agreement = fmean(each.agreement[0] for each in losses)
        last = reports[-1]
        self._curve.add(
            step=last.step,
            epoch=last.epoch,
            tokens=self._tokens,
            seconds=self._seconds,
            loss=loss,
            agreement=agreement,
        )
        return f"loss {loss:.3f}, agreement {agreement:.3f}, {tokens / seconds:.0f} tokens/s"

    def _judge(self, console: Console) -> None:
        """Writes the head as it is now, and drafts with it."""
        weights = self._trainer.learner.published()
        self._kind.write(self._output, weights, self._target)
        drafter = build_drafter(self._judged)
        length = acceptance(drafter, self._held_out, self._rhythm.nodes).length
        self._curve.add(step=self._trainer.done, acceptance_length=length)
        console.print(f"step {self._trainer.done}: acceptance length {length:.3f}")
