"""One target over several processes: `python -m benchmarks.tensor_parallel --json FILE`.

The target has random weights in the shape of a 0.5B model. Two ranks of one thread each stand
beside one process of one and of two threads.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.machine import median_seconds
from benchmarks.random_target import HALF_BILLION, write_target
from benchmarks.rank_processes import RankGroup, rank_group
from coppice.machine import machine
from coppice.tree import DraftTree
from drafter_svc import wire
from kernels import ops
from verifier_svc.ranks import WORDS, Ranks
from verifier_svc.runner import Rows, Runner
from verifier_svc.target import Target

RANKS, SLOTS, CONTEXT, CHUNK = 2, 1024, 512, 256
TREE_ROWS = (1, 8, 16, 64)
CALLS = 5


@dataclass(slots=True)
class Exchanged:
    """What the first rank has sent and received, and how long it took, waiting included."""

    bytes: int = 0
    seconds: float = 0.0
    times: int = 0

    def add(self, count: int, started: float) -> None:
        self.bytes += count
        self.seconds += time.perf_counter() - started
        self.times += 1


@dataclass(slots=True)
class Wire:
    plans: Exchanged = field(default_factory=Exchanged)
    sums: Exchanged = field(default_factory=Exchanged)  # partial sums, and embeddings
    answers: Exchanged = field(default_factory=Exchanged)  # logits, or pairs of value and id


class CountedRanks(Ranks):
    """Counts bytes both ways: what is sent to each other rank, and what comes from each."""

    wire = Wire()

    def all_gather(self, part: Tensor) -> Tensor:
        started = time.perf_counter()
        parts = super().all_gather(part)
        pairs = part.dtype == torch.float64
        kind = self.wire.answers if pairs else self.wire.sums
        kind.add(2 * (self.size - 1) * part.nbytes, started)
        return parts

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        started = time.perf_counter()
        parts = super().gather(part)
        self.wire.answers.add((self.size - 1) * part.nbytes, started)
        return parts

    def send(self, words: Sequence[int]) -> None:
        started = time.perf_counter()
        super().send(words)
        self.wire.plans.add((self.size - 1) * 4 * max(WORDS, 1 + len(words)), started)


def chain(rows: int, greedy: bool = True) -> Rows:
    """A tree of one path below a context, of all of whose rows an answer is wanted."""
    tree = DraftTree(tuple(range(rows - 1)), tuple(range(rows - 1)), (0.0,) * (rows - 1))
    slots = range(CONTEXT, CONTEXT + rows)
    return Rows([1] * rows, slots, slots, list(range(CONTEXT)), tree.masks(), rows, greedy)


def prompt() -> Rows:
    slots = range(CONTEXT, CONTEXT + CHUNK)
    return Rows([1] * CHUNK, slots, slots, list(range(CONTEXT)), None, 1, greedy=True)


def step_ms(runner: Runner) -> dict[str, float]:
    """Median milliseconds of a pass, by its rows; of a chunk of a prompt, by token."""
    passes = {str(rows): chain(rows) for rows in TREE_ROWS}
    medians = {
        name: 1e3 * median_seconds(lambda rows=rows: runner.run([rows]), CALLS)
        for name, rows in passes.items()
    }
    seconds = median_seconds(lambda: runner.run([prompt()]), 3, warm_up=1)
    medians["prompt token"] = 1e3 * seconds / CHUNK
    return {name: round(value, 3) for name, value in medians.items()}


def on_the_wire(runner: Runner, rows: Rows) -> dict[str, dict[str, float]]:
    """Bytes and milliseconds of the exchanges of one pass."""
    CountedRanks.wire = Wire()
    runner.run([rows])
    counted = asdict(CountedRanks.wire)
    return {
        kind: {
            "bytes": each["bytes"],
            "ms": round(1e3 * each["seconds"], 3),
            "times": each["times"],
        }
        for kind, each in counted.items()
    }


def to_drafter(runner: Runner, nodes: int) -> dict[str, int]:
    """Bytes between verifier and drafter: of a tree, and of one token's feature."""
    tree = DraftTree(tuple(range(nodes)), tuple(range(nodes)), (-1.0,) * nodes)
    item = wire.tree("0" * 32, 1, CONTEXT, CONTEXT, tree)
    return {f"tree of {nodes}": item.ByteSize(), "feature": len(runner.read_features([0]))}


def seconds_to_notice(group: RankGroup) -> float:
    """From the death of a rank, while passes run, to the first rank's error."""
    started = time.perf_counter()
    group.followers[0].kill()
    try:
        while True:
            group.runner.run([chain(1)])
    except RuntimeError:
        return time.perf_counter() - started


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    layers: Annotated[int, typer.Option(help="of the target")] = 24,
) -> None:
    """Measures, prints and writes one JSON object."""
    results: dict[str, object] = {"machine": machine(), "setting": {"layers": layers}}
    steps: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = HALF_BILLION | {"num_hidden_layers": layers}
        path = write_target(Path(folder), shape, torch.bfloat16)
        target = Target(path, torch.device("cpu"), torch.bfloat16, False, None)
        for threads in (1, RANKS):
            ops.set_threads(threads)
            steps[f"1 rank, {threads} threads"] = step_ms(Runner(target.load(), SLOTS))
        ops.set_threads(1)
        with rank_group(target, RANKS, SLOTS, first=CountedRanks) as group:
            steps[f"{RANKS} ranks, 1 thread each"] = step_ms(group.runner)
            results["exchanged"] = {
                "plain step": on_the_wire(group.runner, chain(1)),
                "plain step, sampled": on_the_wire(group.runner, chain(1, greedy=False)),
                "tree of 15": on_the_wire(group.runner, chain(16)),
                f"{CHUNK} prompt tokens": on_the_wire(group.runner, prompt()),
            }
            results["drafter_bytes"] = to_drafter(group.runner, 15)
            results["seconds_to_notice_a_dead_rank"] = round(seconds_to_notice(group), 3)
    results["step_ms"] = steps
    text = json.dumps(results, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
