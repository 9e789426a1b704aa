"""How many prompt tokens share a pass with sessions that decode. Pure policy.

Whoever streams should not notice that somebody else's long prompt has arrived: a pass with a part
of it may take `STRETCH` times as long as one without, and the part is made as long as that allows,
by measurement.
"""

from dataclasses import dataclass

STRETCH = 1.75  # below 2, so that passes which come out longer than foreseen stay about there
_FIRST = 16  # tokens, before anything has been measured
_LEAST = 4
# Of the time of a pass: a smaller difference to another one is noise.
_NOISE = 0.05


@dataclass(slots=True)
class PrefillPace:
    """`tokens` of prompts in a pass that others decode in, `most` at most."""

    most: int
    _tokens: float = _FIRST

    @property
    def tokens(self) -> int:
        return min(self.most, int(self._tokens))

    def observe(self, tokens: int, seconds: float, alone: float) -> None:
        """A pass with so many prompt tokens took `seconds`. Its other rows take `alone` by
        themselves; 0: nobody knows."""
        if alone <= 0:
            return
        extra = max(seconds - alone, _NOISE * alone)
        fitting = tokens * (STRETCH - 1) * alone / extra
        # A short prompt says nothing of how many tokens more would have fitted.
        if fitting < tokens or tokens >= self.tokens:
            change = min(max(fitting / self._tokens, 0.5), 2.0)
            self._tokens = max(min(self._tokens * change**0.5, self.most), _LEAST)
