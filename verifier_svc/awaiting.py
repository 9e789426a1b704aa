"""Whether a session's next tree is awaited, for how long, and how long trees take. Pure policy."""

from dataclasses import dataclass, field

from verifier_svc.budget import Grant

MAX_STRIKES = 3
MOST_NEEDED = 64
# How fast the running mean of accepted tokens forgets.
_MEAN_WEIGHT = 0.1


@dataclass(slots=True)
class Patience:
    """A drafter is awaited once it has shown that it is alive, and no more after misses, until it
    has sent some trees by itself: twice as many after each comeback that failed."""

    benched: bool = True
    extra_tokens: float = 1.0  # running mean of accepted tokens of its trees
    _strikes: int = 0
    _needed: int = 1  # trees that end the bench
    _seen: int = 0

    def bench(self) -> None:
        """It has joined, or has to catch up: nobody waits for that."""
        self.benched, self._seen = True, 0

    def came(self, in_time: bool) -> None:
        """A tree has come; late ones count as signs of life."""
        self._seen += 1
        if in_time:
            self._strikes, self._needed = max(0, self._strikes - 1), 1
        if in_time or self._seen >= self._needed:
            self.benched = False

    def missed(self) -> None:
        """An awaited tree did not come in time."""
        self._strikes += 1
        if self._strikes >= MAX_STRIKES:
            self.bench()
            self._needed = min(2 * self._needed, MOST_NEEDED)
            self._strikes = MAX_STRIKES - 1  # one more miss after a comeback is enough

    def verified(self, accepted: int) -> None:
        self.extra_tokens += _MEAN_WEIGHT * (accepted - self.extra_tokens)

    def seconds(self, plain_step: float, least_steps: float) -> float:
        """How long the next tree is worth waiting for: the plain steps that it is expected to
        save, and `least_steps`, or one bad tree after another would end the waiting for good."""
        return 0.0 if self.benched else max(least_steps, self.extra_tokens) * plain_step


@dataclass(frozen=True, slots=True)
class _Ask:
    base_length: int
    at: float
    grant: Grant
    clean: bool  # nothing else was owed: the time until the answer is that of this tree alone


@dataclass(slots=True)
class Asks:
    """The trees that a drafter has been asked for and has not sent."""

    _asks: list[_Ask] = field(default_factory=list[_Ask])

    def add(self, base_length: int, at: float, grant: Grant, in_play: bool) -> None:
        """`in_play` false: the drafter has features to pull first, which says nothing of it."""
        self._asks.append(_Ask(base_length, at, grant, in_play and not self._asks))

    def answered(self, base_length: int, now: float) -> tuple[Grant, float] | None:
        """A tree for `base_length` came: grant and seconds of its drafting, if they are known.
        Earlier asks will not be answered any more."""
        found = next((ask for ask in self._asks if ask.base_length == base_length), None)
        self._asks = [ask for ask in self._asks if ask.base_length > base_length]
        return None if found is None or not found.clean else (found.grant, now - found.at)

    def overdue(self, now: float) -> tuple[Grant, float] | None:
        """The awaited tree has not come: its grant and the seconds that it takes at least."""
        last = self._asks[-1] if self._asks else None
        return None if last is None or not last.clean else (last.grant, now - last.at)

    def clear(self) -> None:
        self._asks.clear()
