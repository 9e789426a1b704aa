"""The concurrency guard: speculation where it pays, plain decoding above a queue depth."""

from collections.abc import Callable

from coppice.settings import DrafterKind, GuardSettings

# Where the threshold is not set, the guard stays open above it while trees are measured to be so
# much faster than plain decoding, and reopens above it only for more.
_STAYS, _REOPENS = 1.05, 1.15


def never_faster(depth: int) -> float:
    """Nothing was measured, so the thresholds alone count."""
    return 0.0


class Guard:
    """A switch with hysteresis and a dwell time. Queue depth = sequences running + waiting.

    `advantage` tells how many times as fast as plain decoding trees are measured to be at a depth.
    """

    def __init__(
        self,
        settings: GuardSettings,
        drafter: DrafterKind = "eagle",
        advantage: Callable[[int], float] = never_faster,
    ) -> None:
        self._enter, self._exit = settings.thresholds(drafter)
        self._advantage = advantage if settings.enter is None else never_faster
        self._dwell_seconds = settings.dwell_seconds
        self._switched_at = -float("inf")
        self._closed_at = 0  # depth
        self.closed = False

    def update(self, depth: int, now: float) -> bool:
        """Takes the queue depth at `now` (seconds); returns whether decoding is plain."""
        if now - self._switched_at < self._dwell_seconds:
            return self.closed
        wanted = not self._reopens(depth) if self.closed else self._closes(depth)
        if wanted != self.closed:
            self.closed = wanted
            self._switched_at, self._closed_at = now, depth
        return self.closed

    def _closes(self, depth: int) -> bool:
        return depth > self._enter and self._advantage(depth) < _STAYS

    def _reopens(self, depth: int) -> bool:
        # An exit of 0 cannot be undercut; there an empty queue reopens.
        if depth < max(1, self._exit):
            return True
        # Closed at a higher depth than `enter`, it reopens as much below that one.
        fallen = depth * self._enter < self._closed_at * self._exit
        return fallen and self._advantage(depth) >= _REOPENS
