"""What long prompts do: the first token of a repeated one, and the streams beside a new one."""

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from benchmarks.closed_loop import Ask, Request, Tally, Window, asks, clients, percentile_ms
from protos import inference_pb2_grpc

PREFIX, ENDING = 1500, 24  # tokens
PREFIXES = 5
LONG_PROMPT = 4096  # tokens
STREAMS, STREAM_TOKENS = 4, 3000
QUIET_SECONDS = 4.0
OPENING_TOKENS = 64  # of a stream's own prompt


@dataclass(frozen=True, slots=True)
class Latencies:
    """Medians and percentiles, in milliseconds."""

    cold_ttft: float
    repeated_ttft: float  # of a prompt that differs from a cold one in its last tokens alone
    quiet_itl_p50: float
    quiet_itl_p99: float
    beside_itl_p50: float  # of running streams while a long prompt is computed
    beside_itl_p99: float

    @property
    def prefix_ttft_ratio(self) -> float:
        return self.repeated_ttft / self.cold_ttft

    @property
    def itl_beside_prompt_ratio(self) -> float:
        return self.beside_itl_p50 / self.quiet_itl_p50


async def measure_latencies(address: str, sets: Iterable[Sequence[Sequence[int]]]) -> Latencies:
    """Of a service with a prefix cache; long prompts are made of the sets' own tokens."""
    every = itertools.cycle(
        list(itertools.chain.from_iterable(itertools.chain.from_iterable(sets)))
    )
    async with grpc.aio.insecure_channel(address) as channel:
        ask = asks(inference_pb2_grpc.InferenceStub(channel), speculation=True)
        cold, repeated = await _prefixes(ask, every)
        quiet, beside = await _beside_long_prompt(ask, every)
    itl = [percentile_ms(each.itl, percent) for each in (quiet, beside) for percent in (50, 99)]
    return Latencies(1e3 * cold, 1e3 * repeated, *(value or math.nan for value in itl))


def _take(tokens: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(tokens, count))


async def _prefixes(ask: Ask, tokens: Iterator[int]) -> tuple[float, float]:
    """Median seconds until the first token: of new prompts, and of their repetitions."""
    await _ttft(ask, _take(tokens, PREFIX))  # the first pass of this size is slow
    cold: list[float] = []
    repeated: list[float] = []
    for _ in range(PREFIXES):
        prefix = _take(tokens, PREFIX)
        cold.append(await _ttft(ask, prefix + _take(tokens, ENDING)))
        repeated.append(await _ttft(ask, prefix + _take(tokens, ENDING)))
    return statistics.median(cold), statistics.median(repeated)


async def _ttft(ask: Ask, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    async with contextlib.aclosing(ask(Request(0, prompt, 0.0, 1))) as pieces:
        await anext(pieces)
        return time.perf_counter() - started


async def _beside_long_prompt(ask: Ask, tokens: Iterator[int]) -> tuple[Tally, Tally]:
    """What streams saw when they were alone, and from a long prompt's arrival to its answer."""
    requests = (
        Request(number, _take(tokens, OPENING_TOKENS), 0.0, STREAM_TOKENS)
        for number in itertools.count()
    )
    async with clients(ask, requests, STREAMS) as heard:
        quiet_from = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        arrival = time.perf_counter()
        await _ttft(ask, _take(tokens, LONG_PROMPT))
        answered = time.perf_counter()
    quiet, beside = Tally(), Tally()
    quiet.add(Window(heard, quiet_from, arrival, None, None))
    beside.add(Window(heard, arrival, answered, None, None))
    return quiet, beside
