"""Plain against speculative decoding, in-process and through the whole service:
`python -m benchmarks.decode --json FILE`.

Greedy, one request at a time, the end of text ignored. Plain and speculative runs of a prompt
follow each other, so that a change of the machine's mood hits both.
"""

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import grpc
import ray
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.inprocess import Answer, LocalLink, generate
from benchmarks.prompts import chat_prompts
from coppice.machine import machine
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device, choose_dtype
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from drafter_svc.building import build_drafter
from kernels import ops
from launcher.compose import off_loop, service
from launcher.sources import load_settings
from launcher.terminal import steps
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from training.evaluation_prompts import DEFAULT_FOLDER, SETS
from verifier_svc.engine import Engine
from verifier_svc.metrics import Timings, VerifierMetrics
from verifier_svc.runner import Runner

GREEDY = SamplingParams(temperature=0.0)
REQUEST_SECONDS = 300.0

Prompts = dict[str, list[list[int]]]


@dataclass(slots=True)
class Samples:
    """One number per prompt, by prompt set."""

    by_set: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, name: str, value: float) -> None:
        self.by_set.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(each), 3) for name, each in self.by_set.items()}


@dataclass(slots=True)
class Measured:
    """What both ways of running have in common."""

    plain_tok_s: Samples = field(default_factory=Samples)
    speculative_tok_s: Samples = field(default_factory=Samples)
    speedup: Samples = field(default_factory=Samples)  # of each prompt: the two ran side by side
    acceptance_length: Samples = field(default_factory=Samples)
    differing_tokens: int = 0
    step_ms: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, tokens: int, plain_seconds: float, seconds: float) -> None:
        self.plain_tok_s.add(name, tokens / plain_seconds)
        self.speculative_tok_s.add(name, tokens / seconds)
        self.speedup.add(name, plain_seconds / seconds)


@dataclass(slots=True)
class InProcess(Measured):
    fixed_budget_tok_s: Samples = field(default_factory=Samples)


def run_in_process(settings: Settings, prompts: Prompts, tokens: int) -> InProcess:
    """Engine and drafter in this process, without the wire: plain, with the measured node budget,
    and with all nodes always."""
    ops.set_threads(settings.verifier.threads)
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    path = resolve_model(settings.model.path, settings.cache_dir)
    drafter = build_drafter(settings)
    runner = Runner(load_target(path, dtype, device), 4096, drafter.features.layers)
    always = settings.speculation.model_copy(update={"budget": "fixed"})
    engine = Engine(runner, settings, VerifierMetrics("auto"))
    fixed = Engine(
        runner, settings.model_copy(update={"speculation": always}), VerifierMetrics("fixed")
    )
    gc.freeze()  # as the services do
    stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
    result, passes, drafting, batches = InProcess(), Timings(), 0.0, 0
    warm_up = next(iter(prompts.values()))[0]
    for each in (engine, fixed):
        generate(each, [warm_up], GREEDY, stopping, LocalLink(each, drafter))
    for name, prompt in track(flat(prompts), f"in-process, {dtype}", console=Console(stderr=True)):
        plain, plain_seconds = timed(engine, prompt, stopping, None)
        auto, auto_seconds = timed(engine, prompt, stopping, LocalLink(engine, drafter))
        link, before = LocalLink(fixed, drafter), replace(fixed.timings)
        drafted, drafted_seconds = timed(fixed, prompt, stopping, link)
        add(passes, fixed.timings, before)
        drafting += link.seconds
        batches += link.batches
        result.add(name, tokens, plain_seconds, auto_seconds)
        result.fixed_budget_tok_s.add(name, tokens / drafted_seconds)
        result.acceptance_length.add(name, acceptance_length(drafted.stats))
        result.differing_tokens += differing(plain.tokens, auto.tokens)
        result.differing_tokens += differing(plain.tokens, drafted.tokens)
    result.step_ms = {
        "draft": 1e3 * drafting / batches,
        "plan": 1e3 * passes.plan / passes.passes,
        "verify": 1e3 * passes.verify / passes.passes,
        "sample": 1e3 * passes.commit / passes.passes,
    }
    return result


def differing(one: list[int], other: list[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def timed(
    engine: Engine, prompt: list[int], stopping: StoppingParams, link: LocalLink | None
) -> tuple[Answer, float]:
    started = time.perf_counter()
    (answer,) = generate(engine, [prompt], GREEDY, stopping, link)
    return answer, time.perf_counter() - started


def acceptance_length(stats: common_pb2.SpeculationStats) -> float:
    """Tokens committed per verification, the new token included."""
    return 1.0 + stats.accepted_nodes / max(1, stats.speculative_steps)


def add(total: Timings, after: Timings, before: Timings) -> None:
    total.passes += after.passes - before.passes
    total.wait += after.wait - before.wait
    total.plan += after.plan - before.plan
    total.verify += after.verify - before.verify
    total.commit += after.commit - before.commit


def flat(prompts: Prompts) -> list[tuple[str, list[int]]]:
    return [(name, prompt) for name, each in prompts.items() for prompt in each]


@dataclass(slots=True)
class Served(Measured):
    ttft_ms: Samples = field(default_factory=Samples)
    ready_seconds: float = 0.0
    missed_drafts: int = 0


async def run_service(settings: Settings, prompts: Prompts, tokens: int) -> Served:
    """The whole: client, gateway, verifier and drafter, over gRPC."""
    result = Served()
    with steps(Console(stderr=True)) as shown:
        async with service(settings, shown) as running:
            result.ready_seconds = running.seconds
            verifier, drafter = (
                ray.get_actor(name, namespace=settings.ray.namespace)
                for name in ("verifier-0", "drafter-0")
            )

            def spent() -> tuple[Timings, float]:
                timings, metrics = ray.get([verifier.timings.remote(), drafter.metrics.remote()])
                return timings, drafting_seconds(metrics)

            await off_loop(lambda: drive(running.address, prompts, tokens, result, spent))
    return result


def drafting_seconds(metrics: str) -> float:
    """All that a drafter has spent on drafts, from its metrics."""
    (line,) = (x for x in metrics.splitlines() if x.startswith("coppice_draft_latency_seconds_sum"))
    return float(line.split()[-1])


def drive(
    address: str,
    prompts: Prompts,
    tokens: int,
    result: Served,
    spent: Callable[[], tuple[Timings, float]],
) -> None:
    """Asks every prompt twice, plain and speculative, and takes down what came of it. `spent` tells
    what verifier and drafter have spent so far."""
    speculative, drafting, seconds, steps_run = Timings(), 0.0, 0.0, 0
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        warm_up = next(iter(prompts.values()))[0]
        for speculation in (True, False):
            ask(stub, warm_up, tokens, speculation)
        for name, prompt in track(flat(prompts), "service", console=Console(stderr=True)):
            plain, plain_seconds, ttft = ask(stub, prompt, tokens, speculation=False)
            before, drafting_before = spent()
            drafted, drafted_seconds, _ = ask(stub, prompt, tokens, speculation=True)
            after, drafting_after = spent()
            add(speculative, after, before)
            drafting += drafting_after - drafting_before
            stats = drafted[-1].speculation
            seconds += drafted_seconds
            steps_run += len(drafted)
            result.add(name, tokens, plain_seconds, drafted_seconds)
            result.acceptance_length.add(name, acceptance_length(stats))
            result.ttft_ms.add(name, 1e3 * ttft)
            result.missed_drafts += stats.missed_drafts
            result.differing_tokens += differing(token_ids(plain), token_ids(drafted))
    busy = speculative.plan + speculative.verify + speculative.commit
    parts = {
        "draft": drafting,
        "wire": max(0.0, speculative.wait - drafting),  # of the waiting for drafts
        "plan": speculative.plan,
        "verify": speculative.verify,
        "sample": speculative.commit,
        "gateway": seconds - busy - speculative.wait,  # and the client's wire
    }
    result.step_ms = {name: 1e3 * part / steps_run for name, part in parts.items()}


def ask(
    stub: inference_pb2_grpc.InferenceStub, prompt: list[int], tokens: int, speculation: bool
) -> tuple[list[inference_pb2.GenerateResponse], float, float]:
    """All pieces, the seconds until the last, and until the first."""
    request = inference_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stopping=common_pb2.StoppingParams(max_tokens=tokens, ignore_eos=True),
        speculation=speculation,
    )
    started = time.perf_counter()
    pieces: list[inference_pb2.GenerateResponse] = []
    first = 0.0
    for piece in stub.Generate(request, timeout=REQUEST_SECONDS):
        first = first or time.perf_counter() - started
        pieces.append(piece)
    return pieces, time.perf_counter() - started, first


def token_ids(pieces: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in parts.items()}


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    prompts: Annotated[int, typer.Option(help="of each set")] = 20,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 128,
    dtype: Annotated[str, typer.Option(help="as model.dtype")] = "auto",
    budget: Annotated[str, typer.Option(help="of the service, as speculation.budget")] = "auto",
    folder: Annotated[Path, typer.Option(help="of the evaluation prompts")] = DEFAULT_FOLDER,
) -> None:
    """Measures, prints and writes one JSON object."""
    flags = {
        "model.dtype": dtype,
        "verifier.prefix_cache": False,  # every prompt is asked more than once
        "gateway.port": 0,
        "gateway.http_port": 0,
    }
    settings = load_settings(flags)
    service_settings = load_settings({**flags, "speculation.budget": budget})
    tokenizer = Tokenizer.load(resolve_model(settings.model.path, settings.cache_dir))
    chosen = {name: chat_prompts(tokenizer, name, prompts, folder) for name in SETS}
    served = asyncio.run(run_service(service_settings, chosen, tokens))
    local = run_in_process(settings, chosen, tokens)
    results = {
        "machine": machine(),
        "setting": {"prompts": prompts, "tokens": tokens, "dtype": dtype, "budget": budget},
        "plain_tok_s": local.plain_tok_s.medians(),
        "speculative_tok_s": local.speculative_tok_s.medians(),
        "speedup": local.speedup.medians(),
        "fixed_budget_tok_s": local.fixed_budget_tok_s.medians(),
        "service_plain_tok_s": served.plain_tok_s.medians(),
        "service_speculative_tok_s": served.speculative_tok_s.medians(),
        "service_speedup": served.speedup.medians(),
        "acceptance_length": local.acceptance_length.medians(),
        "service_acceptance_length": served.acceptance_length.medians(),
        "ttft_ms": served.ttft_ms.medians(),
        "ready_seconds": round(served.ready_seconds, 2),
        "step_ms": {
            "in_process": rounded(local.step_ms),
            "service": rounded(served.step_ms),
        },
        "missed_drafts": served.missed_drafts,
        "differing_tokens": local.differing_tokens + served.differing_tokens,
    }
    text = json.dumps(results, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
