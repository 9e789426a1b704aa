"""The concurrency guard: speculation where it pays, plain decoding above a queue depth."""

from coppice.settings import GuardSettings


class Guard:
    """A switch with hysteresis and a dwell time. Queue depth = sequences running + waiting."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._switched_at = -float("inf")
        self.closed = False

    def update(self, depth: int, now: float) -> bool:
        """Takes the queue depth at `now` (seconds); returns whether decoding is plain."""
        if now - self._switched_at < self._settings.dwell_seconds:
            return self.closed
        # An exit of 0 cannot be undercut; there an empty queue reopens.
        reopen = max(1, self._settings.exit)
        wanted = depth >= reopen if self.closed else depth > self._settings.enter
        if wanted != self.closed:
            self.closed = wanted
            self._switched_at = now
        return self.closed
