"""The service under load, by concurrency and mode: `coppice bench load`.

Clients in this process, the service in others. `auto` is the service as it is set; `off` asks the
same one for plain decoding, for which its drafter does nothing; `on` is a second one with a fixed
budget and no guard. Modes take turns at every concurrency, several times, so that a change of the
machine's mood hits all, and answer the same requests. Prompts are not cached for that reason.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console
from rich.progress import Progress

from benchmarks.closed_loop import (
    Agreement,
    Ask,
    Request,
    Tally,
    Window,
    asks,
    closed_loop,
    endless,
)
from benchmarks.latency import Latencies, measure_latencies
from benchmarks.peers_vllm import vllm_server
from benchmarks.serving import DRAFTER, Served, cpu_seconds, served
from benchmarks.simulation import MODES, Mode
from coppice.errors import StartError
from coppice.models.hub import resolve_model
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from coppice.tree import MAX_ROWS
from protos import inference_pb2_grpc
from training.evaluate import read_sets

NO_GUARD = 1_000_000  # sessions
PROMPTS = 80  # of each set
CONTEXT = 2048  # that a prompt and its answer may have
IDLE_SECONDS = 2.0
WARM_UP_ANSWERS = 6
VLLM_CONCURRENCY = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    concurrency: Sequence[int]
    modes: Sequence[Mode]
    rounds: int
    answers: int  # of a mode in one round, or one of each client where these are more
    tokens: int  # of an answer
    prompts: Sequence[Path]
    vllm: Path | None  # Python of an environment that has it

    @classmethod
    def parsed(
        cls,
        concurrency: str,
        modes: str,
        rounds: int,
        answers: int,
        tokens: int,
        prompts: Sequence[Path],
        vllm: Path | None,
    ) -> "LoadOptions":
        """From lists with commas. Raises StartError."""
        levels = concurrency.split(",")
        if not all(level.strip().isdecimal() and int(level) for level in levels):
            raise StartError(f"--concurrency {concurrency}: give numbers from 1 on, as in 1,8,32")
        chosen: list[Mode] = [mode for mode in MODES if mode in modes.split(",")]
        if set(modes.split(",")) != set(chosen):
            raise StartError(f"--modes {modes}: give some of {','.join(MODES)}")
        if vllm is not None and not vllm.exists():
            raise StartError(f"--vllm {vllm}: no such file; give a Python that has vllm")
        numbers = sorted({int(level) for level in levels})
        return cls(numbers, chosen, rounds, answers, tokens, prompts, vllm)

    def answers_of(self, clients: int) -> int:
        """How many of so many clients' answers make a round."""
        return max(self.answers, clients)


@dataclass(slots=True)
class Cell:
    """One mode at one concurrency."""

    tally: Tally = field(default_factory=Tally)
    speeds: list[float] = field(default_factory=list[float])  # tokens/s, by round
    drafter_cpu_s: float = 0.0
    grants: float = 0.0
    granted_nodes: float = 0.0

    @property
    def node_budget_mean(self) -> float:
        return self.granted_nodes / self.grants if self.grants else 0.0


@dataclass(slots=True)
class Driven:
    """What came of driving all modes at all concurrencies."""

    cells: dict[tuple[int, Mode], Cell] = field(default_factory=dict[tuple[int, Mode], Cell])
    agreement: Agreement = field(default_factory=Agreement)
    idle_cores: float = 0.0  # that services keep busy while nobody asks


@dataclass(frozen=True, slots=True)
class Load:
    """All that was measured."""

    options: LoadOptions
    settings: Settings
    driven: Driven
    latencies: Latencies
    vllm: Mapping[int, Tally]  # by concurrency


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a service, since its start."""

    drafter_cpu_s: float
    grants: float
    granted_nodes: float


def measure(settings: Settings, options: LoadOptions, console: Console) -> Load:
    """Starts services, drives them, and stops them. Raises StartError."""
    path = resolve_model(settings.model.path, settings.cache_dir)
    limit = min(settings.verifier.max_sessions, settings.gateway.max_inflight)
    if max(options.concurrency) > limit:
        raise StartError(
            f"--concurrency {max(options.concurrency)}: the service takes {limit} requests at once "
            "(verifier.max_sessions, gateway.max_inflight)"
        )
    tokenizer = Tokenizer.load(path)
    longest = min(CONTEXT, settings.model.max_context or CONTEXT) - options.tokens
    sets = list(read_sets(tokenizer, options.prompts, PROMPTS, longest).values())
    request = endless(sets, options.tokens)
    room = max(options.concurrency) * (max(len(p) for s in sets for p in s) + options.tokens)
    vllm: dict[int, Tally] = {}
    with Progress(console=console, transient=True) as progress:
        if options.vllm is not None:  # first, since it may not start
            with doing(progress, "vLLM"):
                vllm = asyncio.run(_drive_vllm(options.vllm, path, settings, request, options))
        with contextlib.ExitStack() as parts:
            with doing(progress, "starting services"):
                services: dict[Mode, Served] = {
                    name: parts.enter_context(served(each))
                    for name, each in variants(settings, options.modes, room).items()
                }
            driven = asyncio.run(_drive(services, request, options, progress))
        with doing(progress, "long prompts"), served(settings) as one:
            latencies = asyncio.run(measure_latencies(one.address, sets))
    return Load(options, settings, driven, latencies, vllm)


@contextlib.contextmanager
def doing(progress: Progress, what: str) -> Generator[None, None, None]:
    """Shows what is done while the context lasts."""
    task = progress.add_task(what, total=None)
    try:
        yield
    finally:
        progress.remove_task(task)


def variants(settings: Settings, modes: Sequence[Mode], slots: int) -> dict[Mode, Settings]:
    """The services that the modes need, with `slots` token slots at least, so that nobody waits for
    any."""
    verifier, drafter = (
        group.model_copy(update={"kv_slots": max(group.kv_slots or 0, slots + MAX_ROWS)})
        for group in (settings.verifier, settings.drafter)
    )
    verifier = verifier.model_copy(update={"prefix_cache": False})
    auto = settings.model_copy(update={"verifier": verifier, "drafter": drafter})
    found: dict[Mode, Settings] = {}
    if "auto" in modes or "off" in modes:
        found["auto"] = auto
    if "on" in modes:
        speculation = settings.speculation.model_copy(update={"budget": "fixed"})
        guard = settings.guard.model_copy(update={"enter": NO_GUARD, "exit": NO_GUARD})
        found["on"] = auto.model_copy(update={"speculation": speculation, "guard": guard})
    return found


async def _drive(
    services: Mapping[Mode, Served],
    request: Callable[[int], Request],
    options: LoadOptions,
    progress: Progress,
) -> Driven:
    """All modes at every concurrency, in several rounds."""
    result = Driven()
    async with contextlib.AsyncExitStack() as parts:
        asking: dict[Mode, tuple[Served, Ask]] = {}
        for mode in options.modes:
            one = services["on" if mode == "on" else "auto"]
            channel = await parts.enter_async_context(grpc.aio.insecure_channel(one.address))
            stub = inference_pb2_grpc.InferenceStub(channel)
            asking[mode] = one, asks(stub, speculation=mode != "off")
        for one, ask in asking.values():  # the first passes are slow, and the budget learns
            await _window(one, ask, map(request, itertools.count()), 1, WARM_UP_ANSWERS)
        result.idle_cores = await _idle_cores(list(services.values()))
        total = options.rounds * len(options.concurrency) * len(asking)
        task = progress.add_task("windows", total=total)
        for round_number, level in itertools.product(range(options.rounds), options.concurrency):
            turn = round_number % len(asking)
            modes = list(options.modes)
            for mode in modes[turn:] + modes[:turn]:
                requests = map(request, itertools.count(first_number(round_number, level)))
                window = await _window(*asking[mode], requests, level, options.answers_of(level))
                cell = _take(result, level, mode, window)
                speed = f"{cell.speeds[-1]:.1f} tokens/s"
                progress.console.print(f"{level} clients, {mode}: {speed}", highlight=False)
                progress.advance(task)
        progress.remove_task(task)
    return result


def first_number(round_number: int, concurrency: int) -> int:
    """Of the requests of a round: those of no two rounds or levels overlap."""
    return (round_number * 1000 + concurrency) * 100_000


async def _window(
    one: Served, ask: Ask, requests: Iterator[Request], concurrency: int, answers: int
) -> Window[Counters]:
    drafters = one.processes().get(DRAFTER, [])

    async def probe() -> Counters:
        metrics = await one.metrics()
        return Counters(
            cpu_seconds(drafters),
            metrics["coppice_grants_total"],
            metrics["coppice_granted_nodes_total"],
        )

    return await closed_loop(ask, requests, concurrency, answers, probe)


def _take(result: Driven, concurrency: int, mode: Mode, window: Window[Counters]) -> Cell:
    cell = result.cells.setdefault((concurrency, mode), Cell())
    alone = Tally()
    for tally in (cell.tally, alone):
        tally.add(window)
    cell.speeds.append(alone.tokens_per_second)
    cell.drafter_cpu_s += window.after.drafter_cpu_s - window.before.drafter_cpu_s
    cell.grants += window.after.grants - window.before.grants
    cell.granted_nodes += window.after.granted_nodes - window.before.granted_nodes
    for heard in window.heard:
        result.agreement.add(heard)
    return cell


async def _idle_cores(services: Sequence[Served]) -> float:
    """How many cores all services together keep busy while nobody asks."""
    processes = [each for one in services for some in one.processes().values() for each in some]
    before, started = cpu_seconds(processes), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds(processes) - before) / (time.perf_counter() - started)


async def _drive_vllm(
    python: Path,
    model: Path,
    settings: Settings,
    request: Callable[[int], Request],
    options: LoadOptions,
) -> dict[int, Tally]:
    """The same requests, at those of the concurrencies that vLLM is compared at."""
    tallies: dict[int, Tally] = {}
    async with vllm_server(python, model, settings) as ask:
        await closed_loop(ask, map(request, itertools.count()), 1, WARM_UP_ANSWERS, nothing)
        for round_number, level in itertools.product(range(options.rounds), options.concurrency):
            if level in VLLM_CONCURRENCY:
                requests = map(request, itertools.count(first_number(round_number, level)))
                answers = options.answers_of(level)
                window = await closed_loop(ask, requests, level, answers, nothing)
                tallies.setdefault(level, Tally()).add(window)
    return tallies


async def nothing() -> None:
    """For windows in which nothing else is looked at."""
