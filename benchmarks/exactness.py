"""Speculative against plain decoding, bit for bit: `python -m benchmarks.exactness --json FILE`.

Every evaluation prompt, greedy and sampled: plain answers of all prompts, then speculative ones.
Tokens must be the same, and log-probabilities the same floats. Tree sizes and batch sizes take
turns, so that every prompt is run with one of them; `--every` runs each prompt with all.
"""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.inprocess import Answer, LocalLink, generate
from benchmarks.prompts import chat_prompts
from coppice.machine import machine
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device, choose_dtype, dtype_name
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from coppice.tree import MAX_ROWS
from drafter_svc.building import build_drafter
from kernels import ops
from launcher.sources import load_settings
from training.evaluation_prompts import DEFAULT_FOLDER, SETS
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=1),
    "sampled": SamplingParams(temperature=1.0, top_p=0.95, seed=20261130, logprobs=1),
}
ALL_SETS = (*SETS, "alpaca")
NODES = (1, 7, 15, 63)
BATCHES = (1, 3, 8)
PLAIN_BATCH = 8
SLOTS = 16384

Bits = tuple[list[int], list[float]]


@dataclass(slots=True)
class Tally:
    answers: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    differing_logprobs: int = 0
    accepted: int = 0

    def compare(self, plain: Bits, other: Bits, accepted: int) -> None:
        self.answers += 1
        self.tokens += len(plain[0])
        self.accepted += accepted
        self.differing_tokens += _differing(plain[0], other[0])
        self.differing_logprobs += _differing(plain[1], other[1])


def _differing(one: Sequence[float], other: Sequence[float]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


class Bench:
    """One loaded target and head; an engine for every tree size."""

    def __init__(self, settings: Settings, tokens: int) -> None:
        device = choose_device(settings.model.device)
        dtype = choose_dtype(settings.model.dtype, device)
        path = resolve_model(settings.model.path, settings.cache_dir)
        ops.set_threads(settings.verifier.threads)
        self.dtype = dtype_name(dtype)
        self._settings = settings
        self._stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        self._drafter = build_drafter(settings)
        layers = self._drafter.features.layers
        self._runner = Runner(load_target(path, dtype, device), SLOTS, layers)

    def answers(
        self, prompts: list[list[int]], sampling: SamplingParams, nodes: int | None
    ) -> list[Answer]:
        """All at once; `nodes` None: plainly."""
        speculation = self._settings.speculation.model_copy(
            update={"budget": "fixed", "nodes": nodes or 1}
        )
        verifier = self._settings.verifier.model_copy(
            update={"kv_slots": SLOTS, "row_budget": MAX_ROWS * len(prompts)}
        )
        settings = self._settings.model_copy(
            update={"speculation": speculation, "verifier": verifier}
        )
        engine = Engine(self._runner, settings, VerifierMetrics("exactness"))
        link = None if nodes is None else LocalLink(engine, self._drafter)
        return generate(engine, prompts, sampling, self._stopping, link)


def bits(answer: Answer) -> Bits:
    chosen = [entry.logprob for entry in answer.logprobs]
    return answer.tokens, chosen + [value for entry in answer.logprobs for _, value in entry.top]


def in_batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def run(bench: Bench, prompts: list[list[int]], every: bool) -> dict[str, Tally]:
    """By sampling, nodes and batch."""
    tallies: dict[str, Tally] = {}
    shapes = list(itertools.product(NODES, BATCHES))
    with Progress(console=Console(stderr=True)) as progress:
        for name, sampling in SAMPLINGS.items():
            task = progress.add_task(f"{name}, plain", total=len(prompts))
            plain: list[Bits] = []
            for some in in_batches(prompts, PLAIN_BATCH):
                plain += [bits(answer) for answer in bench.answers(some, sampling, None)]
                progress.advance(task, len(some))
            for index, (nodes, batch) in enumerate(shapes):
                numbers = range(len(prompts)) if every else range(index, len(prompts), len(shapes))
                task = progress.add_task(f"{name}, {nodes} nodes x {batch}", total=len(numbers))
                tally = tallies.setdefault(f"{name} nodes {nodes} batch {batch}", Tally())
                for start in range(0, len(numbers), batch):
                    mine = numbers[start : start + batch]
                    answers = bench.answers([prompts[n] for n in mine], sampling, nodes)
                    for number, answer in zip(mine, answers, strict=True):
                        tally.compare(plain[number], bits(answer), answer.stats.accepted_nodes)
                    progress.advance(task, len(mine))
    return tallies


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    prompts: Annotated[int, typer.Option(help="of each set at most")] = 1000,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 128,
    every: Annotated[bool, typer.Option(help="every prompt with every shape (hours)")] = False,
    dtype: Annotated[str, typer.Option(help="as model.dtype")] = "auto",
    folder: Annotated[Path, typer.Option(help="of the evaluation prompts")] = DEFAULT_FOLDER,
) -> None:
    """Compares, prints and writes one JSON object; exits with 1 where a bit differs."""
    settings = load_settings({"model.dtype": dtype, "verifier.prefix_cache": False})
    tokenizer = Tokenizer.load(resolve_model(settings.model.path, settings.cache_dir))
    chosen = [p for name in ALL_SETS for p in chat_prompts(tokenizer, name, prompts, folder)]
    bench = Bench(settings, tokens)
    started = time.perf_counter()
    tallies = run(bench, chosen, every)
    results = {
        "machine": machine(),
        "setting": {"prompts": len(chosen), "tokens": tokens, "dtype": bench.dtype, "every": every},
        "seconds": round(time.perf_counter() - started),
        "answers": sum(tally.answers for tally in tallies.values()),
        "tokens": sum(tally.tokens for tally in tallies.values()),
        "accepted_nodes": sum(tally.accepted for tally in tallies.values()),
        "differing_tokens": sum(tally.differing_tokens for tally in tallies.values()),
        "differing_logprobs": sum(tally.differing_logprobs for tally in tallies.values()),
        "answers_by_shape": {name: tally.answers for name, tally in tallies.items()},
    }
    text = json.dumps(results, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)
    if results["differing_tokens"] or results["differing_logprobs"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
