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
    quiet_itl_p50: float  # of running streams, mean of before and after
    quiet_itl_p99: float
    beside_itl_p50: float  # while a long prompt is computed
    beside_itl_p99: float
    beside_ttft: float  # of that prompt

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
        before, beside, after = await _beside_long_prompt(ask, every)
    return Latencies(
        cold_ttft=1e3 * cold,
        repeated_ttft=1e3 * repeated,
        quiet_itl_p50=(_itl(before, 50) + _itl(after, 50)) / 2,
        quiet_itl_p99=(_itl(before, 99) + _itl(after, 99)) / 2,
        beside_itl_p50=_itl(beside, 50),
        beside_itl_p99=_itl(beside, 99),
        beside_ttft=1e3 * beside.seconds,
    )


def _itl(tally: Tally, percent: float) -> float:
    return percentile_ms(tally.itl, percent) or math.nan


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


async def _beside_long_prompt(ask: Ask, tokens: Iterator[int]) -> tuple[Tally, Tally, Tally]:
    """What streams saw before a long prompt's arrival, until its answer, and after that: they grow
    meanwhile, and with them what a token takes."""
    requests = (
        Request(number, _take(tokens, OPENING_TOKENS), 0.0, STREAM_TOKENS)
        for number in itertools.count()
    )
    async with clients(ask, requests, STREAMS) as heard:
        for each in heard:
            await each.begun.wait()
        quiet_from = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        arrival = time.perf_counter()
        await _ttft(ask, _take(tokens, LONG_PROMPT))
        answered = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        end = time.perf_counter()
    before, beside, after = Tally(), Tally(), Tally()
    before.add(Window(heard, quiet_from, arrival, None, None))
    beside.add(Window(heard, arrival, answered, None, None))
    after.add(Window(heard, answered, end, None, None))
    return before, beside, after
