"""Whether it pays that a drafter catches up with a session. Pure policy.

A drafter that joins a session reads its tokens and features before it drafts. Where it shares cores
with the verifier, passes beside take longer meanwhile; where it has its own, they don't. So that is
measured: by how much passes take longer than foretold while a drafter catches up. It is worth it
where trees save more until the answer's end, as far as an end can be foreseen: while prompts are
read that is less than otherwise.
"""

from dataclasses import dataclass

# Of the sums of all that was measured, at each catching up.
_FORGET = 1 / 32
# Passes that the share of those without prompts is a running mean of.
_QUIET_PASSES = 128
_ENDED_WEIGHT = 0.1  # of an answer, in the running mean of their lengths


@dataclass(frozen=True, slots=True)
class Gap:
    """A session whose drafter would have to catch up."""

    positions: int  # that it lacks
    produced: int  # tokens of the answer
    left: int  # that it may still have


@dataclass(slots=True)
class CatchingUp:
    _seconds: float = 0.0  # that passes took longer than foretold
    _positions: float = 0.0  # that were caught up with
    _times: float = 0.0
    _quiet: float = 1.0  # share of the passes that read no prompt
    _lasting: float | None = None  # tokens of an answer

    def begins(self, positions: int) -> None:
        """A drafter is asked that lacks so many."""
        self._seconds *= 1 - _FORGET
        self._positions += positions - _FORGET * self._positions
        self._times += 1 - _FORGET * self._times

    def delayed(self, seconds: float) -> None:
        """A pass took so much longer than foretold while drafters caught up."""
        self._seconds += seconds

    def ended(self, tokens: int) -> None:
        """An answer has ended with so many tokens."""
        before = tokens if self._lasting is None else self._lasting
        self._lasting = before + _ENDED_WEIGHT * (tokens - before)

    def committed(self, sessions: int, reading: bool) -> None:
        """A pass of so many sessions has committed for one of them."""
        self._quiet += (float(not reading) - self._quiet) / (_QUIET_PASSES * sessions)

    @property
    def usual_seconds(self) -> float:
        """What one usually costs."""
        return max(0.0, self._seconds) / max(self._times, 1.0)

    def pays(self, gap: Gap, saved: float, beside: float = 0.0) -> bool:
        """Whether it does where a token saves so many seconds while no prompt is read, and `beside`
        while one is."""
        cost = gap.positions * max(0.0, self._seconds) / max(self._positions, 1.0)
        saved = saved * self._quiet + beside * (1 - self._quiet)
        return cost <= saved * self._remaining(gap)

    def _remaining(self, gap: Gap) -> float:
        """Tokens that are still to come: as in other answers; beyond that an answer is expected to
        go on for as long as it has."""
        if self._lasting is None:
            return gap.left
        return min(gap.left, max(self._lasting - gap.produced, gap.produced))
