"""Load for `simulate.py`: when sessions arrive and how many tokens each of them wants."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

MEAN_TOKENS = 200


class Traffic(Protocol):
    seconds: float  # from the first arrival to the last

    def arrivals(self, now: float, running: int) -> list[int]:
        """The tokens that each of those wants who have arrived since the last call."""
        ...

    def next_arrival(self, now: float) -> float | None:
        """When the next one comes if nobody is there at `now`; None: nobody comes any more."""
        ...

    def over(self, now: float) -> bool:
        """Whether all ends at `now`, whoever is there."""
        ...


@dataclass(slots=True)
class Constant:
    """Always so many sessions from each of the given times on, until `seconds`: who is done is
    replaced, who is too many finishes. `steps` are (seconds, sessions) in order of time, from 0."""

    steps: Sequence[tuple[float, int]]
    seconds: float
    random: Random

    def arrivals(self, now: float, running: int) -> list[int]:
        wanted = [sessions for start, sessions in self.steps if start <= now][-1]
        return [_length(self.random) for _ in range(wanted - running)]

    def next_arrival(self, now: float) -> float | None:
        return next((start for start, sessions in self.steps if start > now and sessions), None)

    def over(self, now: float) -> bool:
        return now >= self.seconds


@dataclass(slots=True)
class Replay:
    """Sessions that come when they come: (seconds, tokens), in order of time."""

    trace: Iterable[tuple[float, int]]
    seconds: float = field(init=False)
    _coming: list[tuple[float, int]] = field(init=False)  # the next one last

    def __post_init__(self) -> None:
        self._coming = sorted(self.trace, reverse=True)
        self.seconds = self._coming[0][0] if self._coming else 0.0

    def arrivals(self, now: float, running: int) -> list[int]:
        come: list[int] = []
        while self._coming and self._coming[-1][0] <= now:
            come.append(self._coming.pop()[1])
        return come

    def next_arrival(self, now: float) -> float | None:
        return self._coming[-1][0] if self._coming else None

    def over(self, now: float) -> bool:
        return False


def poisson(rate: float, seconds: float, random: Random) -> Iterator[tuple[float, int]]:
    """A trace of `rate` arrivals per second on average, for so long."""
    at = random.expovariate(rate)
    while at < seconds:
        yield at, _length(random)
        at += random.expovariate(rate)


def read_trace(path: Path) -> list[tuple[float, int]]:
    """From a file with a JSON object in each line: {"at": seconds, "tokens": number}."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [(float(line["at"]), int(line["tokens"])) for line in lines]


def _length(random: Random) -> int:
    return random.randint(MEAN_TOKENS // 2, MEAN_TOKENS * 3 // 2)
