"""The field's ways to draft, side by side on one target: `coppice bench paradigms`.

Engine and drafter in one thread, without the wire, greedy, one request at a time, the end of text
ignored. All have the same budget of nodes (speculation.nodes), always in full: the static trees of
EAGLE-1 and Medusa, made for 25 and 63 nodes, are cut to their best ones. A prompt is answered in
all ways in turn, so that a change of the machine's mood hits all.
"""

import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.inprocess import LocalLink, generate
from coppice.machine import machine
from coppice.models.decoder import Decoder
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device, choose_dtype, dtype_name
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings, SpeculationSettings
from coppice.tokenizer import Tokenizer
from drafter_svc.building import build_drafter
from drafter_svc.drafter import Drafter
from kernels import ops
from kernels.batch import KVCache
from training.evaluate import read_sets
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner

GREEDY = SamplingParams(temperature=0.0)
OURS = ("coppice.", "drafter_svc.", "kernels.")
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ParadigmOptions:
    medusa: Path | None  # directories of heads
    eagle3: Path | None
    draft_model: str | None  # as speculation.draft_model
    prompts: Sequence[Path]
    count: int  # prompts of each file, the first ones
    tokens: int  # of an answer


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to draft, or the flag that would bring it in."""

    name: str
    speculation: Mapping[str, object]  # settings
    missing: str = ""


@dataclass(slots=True)
class Measured:
    weights_bytes: int = 0  # that the drafter holds, borrowed ones too: it is a process of its own
    kv_bytes_per_token: int = 0
    speeds: list[float] = field(default_factory=list[float])  # tokens/s of every prompt
    committed: int = 0  # tokens after the first ones
    steps: int = 0
    differing_tokens: int = 0  # from the plain answer

    @property
    def acceptance_length(self) -> float:
        return self.committed / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    dtype: str
    nodes: int
    options: ParadigmOptions
    measured: Mapping[str, Measured]  # by name, the plain one first
    left_out: Mapping[str, str]  # names, with the flags that would bring them in


def contenders(options: ParadigmOptions) -> list[Contender]:
    """All but plain decoding."""

    def given(name: str, flag: str, value: object, **speculation: object) -> Contender:
        return Contender(name, speculation, "" if value is not None else flag)

    # Ranks and levels as published.
    static = {"tree": "static", "top_k": 10, "depth": 6}
    model = {"drafter": "model", "draft_model": options.draft_model}
    medusa = {"drafter": "medusa", "head": options.medusa}
    return [
        Contender("n-gram", {"drafter": "ngram"}),
        given("draft model", "--draft-model", options.draft_model, **model),
        given("Medusa", "--medusa", options.medusa, **medusa, **static),
        Contender("EAGLE-1 static", {"drafter": "eagle", **static}),
        Contender("EAGLE-2 dynamic", {"drafter": "eagle"}),
        Contender("EAGLE-2 + n-gram", {"drafter": "eagle", "ngram": True}),
        given("EAGLE-3", "--eagle3", options.eagle3, drafter="eagle", head=options.eagle3),
    ]


def compare(settings: Settings, options: ParadigmOptions, console: Console) -> Comparison:
    """Answers all prompts in all ways. Raises StartError."""
    ops.set_threads(settings.verifier.threads)
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    path = resolve_model(settings.model.path, settings.cache_dir)
    model = load_target(path, dtype, device, settings.model.max_context)
    longest = model.config.max_context - options.tokens
    sets = read_sets(Tokenizer.load(path), options.prompts, options.count, longest)
    prompts = list(chain.from_iterable(sets.values()))
    slots = max(map(len, prompts)) + options.tokens + 64
    everyone = contenders(options)
    arenas = {PLAIN: Arena.plain(settings, model, slots)}
    for each in everyone:
        if not each.missing:
            arenas[each.name] = Arena.drafting(settings, each.speculation, model, slots)
    gc.freeze()  # as the services do
    measured = {name: Measured(*arena.footprint()) for name, arena in arenas.items()}
    for arena in arenas.values():
        arena.answer(prompts[0], 16)
    for prompt in track(prompts, f"all ways, {dtype_name(dtype)}", console=console):
        plain: list[int] = []
        for name, arena in arenas.items():
            started = time.perf_counter()
            tokens, steps = arena.answer(prompt, options.tokens)
            seconds = time.perf_counter() - started
            plain = plain or tokens
            found = measured[name]
            found.speeds.append(len(tokens) / seconds)
            found.committed += len(tokens) - 1
            found.steps += steps
            found.differing_tokens += sum(a != b for a, b in zip(plain, tokens, strict=True))
    left_out = {each.name: each.missing for each in everyone if each.missing}
    return Comparison(dtype_name(dtype), settings.speculation.nodes, options, measured, left_out)


@dataclass(frozen=True, slots=True)
class Arena:
    """An engine, with a drafter or without."""

    engine: Engine
    drafter: Drafter | None

    @classmethod
    def plain(cls, settings: Settings, model: Decoder, slots: int) -> "Arena":
        return cls(Engine(Runner(model, slots), settings, VerifierMetrics(PLAIN)), None)

    @classmethod
    def drafting(
        cls, settings: Settings, speculation: Mapping[str, object], model: Decoder, slots: int
    ) -> "Arena":
        usual = {"budget": "fixed", "tree": "dynamic", "ngram": False}
        changed = {**settings.speculation.model_dump(), **usual, **speculation}
        own = settings.model_copy(
            update={"speculation": SpeculationSettings.model_validate(changed)}
        )
        drafter = build_drafter(own)
        runner = Runner(model, slots, drafter.features.layers)
        return cls(Engine(runner, own, VerifierMetrics("bench")), drafter)

    def answer(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """The answer, and the verifications that it took."""
        link = None if self.drafter is None else LocalLink(self.engine, self.drafter)
        stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        (answer,) = generate(self.engine, [prompt], GREEDY, stopping, link)
        steps = len(answer.tokens) - 1 if link is None else answer.stats.speculative_steps
        return answer.tokens, steps

    def footprint(self) -> tuple[int, int]:
        """Bytes of weights, and of K/V per token, that the drafter holds."""
        tensors: dict[int, int] = {}
        per_token = 0
        for found in reachable(self.drafter):
            if isinstance(found, KVCache):
                per_token += (found.k.nbytes + found.v.nbytes) // found.k.shape[1]
            else:
                storage = found.untyped_storage()
                tensors[storage.data_ptr()] = storage.nbytes()
        return sum(tensors.values()), per_token


def reachable(root: object) -> Iterator[Tensor | KVCache]:
    """All tensors, and all caches as a whole, that an object of ours leads to."""
    waiting, seen = [root], set[int]()
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | KVCache):
            yield each
        elif isinstance(each, tuple | list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
        elif dataclasses.is_dataclass(each):
            waiting += [getattr(each, f.name, None) for f in dataclasses.fields(each)]
        elif type(each).__module__.startswith(OURS):
            waiting += vars(each).values()


def as_json(comparison: Comparison) -> dict[str, Any]:
    plain = median(comparison.measured[PLAIN].speeds)
    options = comparison.options
    return {
        "machine": machine(),
        "setting": {
            "prompts": options.count,
            "sets": [file.stem for file in options.prompts],
            "tokens": options.tokens,
            "nodes": comparison.nodes,
            "dtype": comparison.dtype,
        },
        "paradigms": {
            name: {
                "acceptance_length": round(each.acceptance_length, 4),
                "tokens_per_second": round(median(each.speeds), 2),
                "over_plain": round(median(each.speeds) / plain, 4),
                "weights_bytes": each.weights_bytes,
                "kv_bytes_per_token": each.kv_bytes_per_token,
                "differing_tokens": each.differing_tokens,
            }
            for name, each in comparison.measured.items()
        },
        "left_out": dict(comparison.left_out),
    }


def show(comparison: Comparison, console: Console) -> None:
    title = f"{comparison.nodes} nodes, {comparison.dtype}, medians over prompts"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("drafted by", no_wrap=True)
    for heading in ("acceptance length", "tokens/s", "over plain", "weights, MB", "KV, kB/token"):
        table.add_column(heading, justify="right")
    plain = median(comparison.measured[PLAIN].speeds)
    for name, each in comparison.measured.items():
        speed = median(each.speeds)
        ratio = f"{speed / plain:.2f}"
        table.add_row(
            name,
            f"{each.acceptance_length:.2f}",
            f"{speed:.1f}",
            ratio if speed >= plain else f"{ratio} (loses)",
            f"{each.weights_bytes / 1e6:.1f}",
            f"{each.kv_bytes_per_token / 1e3:.2f}",
        )
    console.print(table)
    if comparison.left_out:
        needed = ", ".join(f"{name} ({flag})" for name, flag in comparison.left_out.items())
        console.print(f"Left out, as not given: {needed}.", highlight=False)
    differing = sum(each.differing_tokens for each in comparison.measured.values())
    console.print(f"Tokens that differ from the plain answers: {differing}.", highlight=False)
