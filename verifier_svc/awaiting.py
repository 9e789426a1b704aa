"""Whether a session's next tree is awaited, for how long, and how long trees take. Pure policy."""

from dataclasses import dataclass, field, replace

from verifier_svc.budget import Budget, Grant

MAX_STRIKES = 3
MOST_NEEDED = 64
# How fast the running mean of what trees are worth forgets.
_MEAN_WEIGHT = 0.1
# Of so few tokens nothing can be told: no tree is compared with less.
_LEAST_GAIN = 0.1
# A tree is awaited for so many plain steps at least; with a fixed budget the user has said that
# trees are wanted, also where they do not pay.
_LEAST_STEPS, _LEAST_STEPS_FIXED = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class Awaited:
    """A tree that a drafter was asked for and that passes wait for. Seconds of one clock."""

    asked: float
    expected: float  # when it should be there
    until: float  # nobody waits longer
    nodes: int  # that it may have


@dataclass(slots=True)
class Patience:
    """A drafter is awaited once it has shown that it is alive, and no more after misses, until it
    has sent some trees by itself: twice as many after each comeback that failed."""

    benched: bool = True
    # Running mean of the tokens that its trees brought, over those that trees of their size bring
    # on average. Only of those that came in time: what is left of a late one says nothing of it.
    worth: float = 1.0
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

    def verified(self, accepted: int, gain: float) -> None:
        """A tree that came in time brought `accepted` tokens, and its like `gain`."""
        self.worth += _MEAN_WEIGHT * (accepted / max(gain, _LEAST_GAIN) - self.worth)

    def gain(self, nodes: int, budget: Budget) -> float:
        """The tokens that its next tree, of so many nodes, is expected to bring."""
        return self.worth * budget.gain(nodes)

    def awaits(self, grant: Grant, now: float, budget: Budget) -> Awaited | None:
        """Whether the tree that is asked for `now` is awaited, and how long at most: the plain
        steps that it is expected to save, and a few at least, or one bad tree after another would
        end the waiting for good."""
        least = _LEAST_STEPS if budget.adaptive else _LEAST_STEPS_FIXED
        steps = max(least, self.gain(grant.nodes, budget))
        seconds = steps * budget.step_seconds(grant.sessions)
        if self.benched or not seconds:
            return None
        expected = now + budget.draft_seconds(grant.nodes, grant.sessions)
        return Awaited(now, expected, now + seconds, grant.nodes)


@dataclass(frozen=True, slots=True)
class _Ask:
    base_length: int
    at: float
    grant: Grant
    caught_up: bool
    clean: bool  # nothing else was owed: the time until the answer is that of this tree alone


@dataclass(slots=True)
class Asks:
    """The trees that a drafter has been asked for and has not sent."""

    _asks: list[_Ask] = field(default_factory=list[_Ask])
    _overdue: bool = False  # the last one: what it takes is worth knowing in any case

    def add(self, base_length: int, at: float, grant: Grant, caught_up: bool) -> None:
        """`caught_up` false: the drafter has to do that first, which says nothing of it."""
        clean = caught_up and not self._asks
        self._asks.append(_Ask(base_length, at, grant, caught_up, clean))
        self._overdue = False

    def answered(self, base_length: int, now: float) -> tuple[Grant, float] | None:
        """A tree for `base_length` came: grant and seconds of its drafting, if they are known.
        Earlier asks will not be answered any more."""
        found = next((ask for ask in self._asks if ask.base_length == base_length), None)
        self._asks = [ask for ask in self._asks if ask.base_length > base_length]
        return None if found is None or not found.clean else (found.grant, now - found.at)

    def overdue(self, now: float) -> tuple[Grant, float] | None:
        """The awaited tree has not come: its grant and the seconds that it takes at least."""
        self._overdue = True
        last = self._asks[-1] if self._asks else None
        return None if last is None or not last.clean else (last.grant, now - last.at)

    def disturb(self) -> None:
        """A pass runs beside, perhaps on the drafter's cores."""
        if self._asks and not self._overdue:
            self._asks[-1] = replace(self._asks[-1], clean=False)

    @property
    def at_work(self) -> bool:
        """Whether the drafter is. After so many asks without an answer one stops believing it."""
        return 0 < len(self._asks) <= MAX_STRIKES

    @property
    def catching_up(self) -> bool:
        """Whether the drafter is at work on that."""
        return self.at_work and not all(ask.caught_up for ask in self._asks)

    def clear(self) -> None:
        self._asks.clear()
