"""The optimizer's side of a fit: steps, and a state that can be kept and taken up again exactly."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coppice.errors import StartError
from training.batches import Lesson, Order, collate
from training.learners import Learner
from training.objective import Losses

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
CLIP = 1.0  # norm of the gradient
WARM_UP_STEPS = 50


@dataclass(frozen=True, slots=True)
class Schedule:
    epochs: int
    batch_tokens: int  # answer tokens of a step at most, padding included
    learning_rate: float  # at its highest; linear warm-up, then cosine to 0
    noise: float  # of the features that are read
    seed: int


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int  # from 1 on
    epoch: float  # done
    tokens: int  # positions that were taught in this step
    losses: Losses
    learning_rate: float


class Trainer:
    """Steps through the lessons by the schedule. Everything random comes of the seed and of
    `generator`, whose state is part of what is kept."""

    def __init__(
        self,
        learner: Learner,
        lessons: Sequence[Lesson],
        schedule: Schedule,
        generator: torch.Generator,
    ) -> None:
        self.learner = learner
        self.done = 0  # steps
        self._lessons = lessons
        self._schedule = schedule
        self._generator = generator
        lengths = [lesson.sample.answer_rows for lesson in lessons]
        order = Order(lengths, schedule.batch_tokens, schedule.seed)
        self._batches = [batch for n in range(schedule.epochs) for batch in order.epoch(n)]
        self._optimizer = torch.optim.AdamW(
            learner.module.parameters(), lr=0.0, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    @property
    def steps(self) -> int:
        """In all epochs."""
        return len(self._batches)

    def run(self) -> Iterator[StepReport]:
        """The steps that are left. Between two of them the trainer can be saved."""
        while self.done < self.steps:
            yield self._step()

    def _step(self) -> StepReport:
        rate = self._rate(self.done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        chosen = [self._lessons[index] for index in self._batches[self.done]]
        batch = collate(chosen, self._schedule.noise, self._generator)
        losses = self.learner.losses(batch)
        if not bool(torch.isfinite(losses.total.detach())):
            raise StartError(
                f"step {self.done + 1}: the loss is {float(losses.total.detach())}; take a lower "
                "--learning-rate"
            )
        losses.total.backward()
        nn.utils.clip_grad_norm_(self.learner.module.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1
        epoch = self.done * self._schedule.epochs / self.steps
        return StepReport(self.done, epoch, int(batch.valid.sum()), losses, rate)

    def _rate(self, step: int) -> float:
        warm = min(WARM_UP_STEPS, self.steps // 10)
        if step < warm:
            return self._schedule.learning_rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self._schedule.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))

    def save(self, path: Path) -> None:
        """Appears by a rename, hence whole or not at all."""
        state = {
            "steps": self.steps,
            "done": self.done,
            "module": self.learner.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(path)

    def restore(self, path: Path) -> None:
        """Goes on exactly where `save` was called. Raises StartError for another run's state."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if state["steps"] != self.steps:
            raise StartError(
                f"{path} is of a run of {state['steps']} steps, this one has {self.steps}: go on "
                "with the same data and options, or take another --output"
            )
        self.done = state["done"]
        self.learner.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
