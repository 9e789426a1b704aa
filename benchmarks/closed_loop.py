"""Clients that each ask again as soon as they are answered, and what they see meanwhile.

What a request asks depends on its number alone, so answers can be compared wherever they are from.
"""

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from protos import common_pb2, inference_pb2, inference_pb2_grpc

TEMPERATURES = (0.0, 0.8)
REQUEST_SECONDS = 900.0

Mode = common_pb2.DecodingMode.ValueType
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """A number, and what is asked under it."""

    number: int  # the seed, too
    prompt: Sequence[int]
    temperature: float
    tokens: int  # of the answer: the end of text is ignored


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once."""

    tokens: Sequence[int]
    mode: Mode = common_pb2.DECODING_MODE_UNSPECIFIED


Ask = Callable[[Request], AsyncGenerator[Piece, None]]


def endless(sets: Iterable[Sequence[Sequence[int]]], tokens: int) -> Callable[[int], Request]:
    """The request of a number: sets take turns, then temperatures, then prompts."""
    sets = list(sets)

    def request(number: int) -> Request:
        turn, which = divmod(number, len(sets))
        index, temperature = divmod(turn, len(TEMPERATURES))
        prompts = sets[which]
        return Request(number, prompts[index % len(prompts)], TEMPERATURES[temperature], tokens)

    return request


def asks(stub: "inference_pb2_grpc.InferenceAsyncStub", speculation: bool) -> Ask:
    """Requests of a service of ours."""

    async def ask(request: Request) -> AsyncGenerator[Piece, None]:
        message = inference_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=request.prompt),
            sampling=common_pb2.SamplingParams(
                temperature=request.temperature, seed=request.number
            ),
            stopping=common_pb2.StoppingParams(max_tokens=request.tokens, ignore_eos=True),
            speculation=speculation,
        )
        call = stub.Generate(message, timeout=REQUEST_SECONDS)
        try:
            async for response in call:
                yield Piece(tuple(response.token_ids), response.mode)
        finally:
            call.cancel()

    return ask


@dataclass(slots=True)
class Heard:
    """One answer as its client saw it."""

    request: Request
    asked: float  # times of time.perf_counter
    times: list[float] = field(default_factory=list[float])  # of the pieces
    pieces: list[Piece] = field(default_factory=list[Piece])
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # something has come
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """All answers of a load, and the time that counts of it."""

    heard: Sequence[Heard]
    start: float
    end: float
    before: T  # what `probe` told at its start and end
    after: T


@contextlib.asynccontextmanager
async def clients(
    ask: Ask, requests: Iterator[Request], concurrency: int
) -> AsyncGenerator[list[Heard], None]:
    """Keeps `concurrency` requests going; entered when all have been asked. Yields the list that
    answers come into, in the order of their requests: always `concurrency` more than are whole.
    What still runs at the end is cancelled. Raises what a request raised."""
    answers: list[Heard] = []

    async def client() -> None:
        while True:
            heard = Heard(next(requests), time.perf_counter())
            answers.append(heard)
            async for piece in ask(heard.request):
                heard.times.append(time.perf_counter())
                heard.pieces.append(piece)
                heard.begun.set()
            heard.whole.set()

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(client()) for _ in range(concurrency)]
            await asyncio.sleep(0)
            yield answers
            for each in running:
                each.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def closed_loop(
    ask: Ask,
    requests: Iterator[Request],
    concurrency: int,
    answers: int,
    probe: Callable[[], Awaitable[T]],
) -> Window[T]:
    """From the first request to the end of the last of the first `answers`, while whoever is done
    asks on. So all that are driven do the same work: in windows of some seconds a few long prompts
    more or less make a tenth of the tokens."""
    before, start = await probe(), time.perf_counter()
    async with clients(ask, requests, concurrency) as heard:
        for index in range(answers):
            await heard[index].whole.wait()
        end, after = time.perf_counter(), await probe()
    return Window(heard, start, end, before, after)


@dataclass(slots=True)
class Tally:
    """What happened in windows, pooled."""

    seconds: float = 0.0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list[float])  # seconds
    itl: list[float] = field(default_factory=list[float])  # seconds, one for every token
    trees: int = 0  # verified
    of_trees: int = 0  # tokens that they committed
    steps: int = 0  # after the first tokens
    guarded: int = 0  # of them

    def add(self, window: Window[T]) -> None:
        self.seconds += window.end - window.start
        for heard in window.heard:
            self._add(heard, window)

    def _add(self, heard: Heard, window: Window[T]) -> None:
        """The time of a step is shared by its tokens."""
        before = heard.asked
        for index, (now, piece) in enumerate(zip(heard.times, heard.pieces, strict=True)):
            count = len(piece.tokens)
            if window.start < now <= window.end and count:
                self.tokens += count
                if index == 0:
                    self.ttft.append(now - before)
                else:
                    self.itl += [(now - before) / count] * count
                    self._add_step(piece)
            before = now

    def _add_step(self, piece: Piece) -> None:
        self.steps += 1
        self.guarded += piece.mode == common_pb2.DECODING_MODE_GUARDED
        if piece.mode == common_pb2.DECODING_MODE_SPECULATIVE:
            self.trees += 1
            self.of_trees += len(piece.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per verified tree; None without any."""
        return self.of_trees / self.trees if self.trees else None

    @property
    def guarded_share(self) -> float:
        return self.guarded / self.steps if self.steps else 0.0


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """In milliseconds, between the nearest two by proportion; None where there are none."""
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


@dataclass(slots=True)
class Agreement:
    """Answers to the same requests, as far as both go."""

    compared: int = 0  # tokens
    differing: int = 0
    _known: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by number

    def add(self, heard: Heard) -> None:
        tokens = heard.tokens
        known = self._known.setdefault(heard.request.number, tokens)
        if known is tokens:
            return
        self.compared += min(len(known), len(tokens))
        self.differing += sum(a != b for a, b in zip(known, tokens, strict=False))
        if len(tokens) > len(known):
            self._known[heard.request.number] = tokens
