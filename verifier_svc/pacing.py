"""How many prompt tokens share a pass with sessions that decode. Pure policy.

Whoever streams should not notice that somebody else's long prompt has arrived: a pass with parts of
prompts may take `STRETCH` times as long as one without, and parts are as long as that allows. Where
several prompts wait, it may take that many times what a pass would if all but one of them were read
and decoding, as they are about to: else the few who decode would hold up the many who wait, and
weights would be read for few rows again and again. What parts add is foretold before they are run,
from what was measured at start: the pass has more rows, and attention reads the context of each
part, a little once and the rest for each of its tokens. By how much that is wrong is learned from
every such pass.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verifier_svc.costs import CostCurve
from verifier_svc.scheduler import SessionView

STRETCH = 1.8  # below 2, so that passes which come out longer than foreseen stay about there
# Behind a context so long that one token doubles the time no part is short enough. Then so many
# times what that token adds is taken: a few more cost little beside it.
_BEYOND = 1.5
# Of a pass that is twice as long by its parts, in the running mean of the error.
_WEIGHT = 0.2
# What is less or more of what was foretold is not due to the parts.
_LEAST_ERROR, _MOST_ERROR = 0.5, 3.0

Part = tuple[int, int]  # tokens of a prompt, and of its context before them


@dataclass(slots=True)
class PrefillPace:
    """`most` tokens in a pass at most; `alone` tells what a pass of so many rows takes without.
    Nothing else bounds the parts where nothing was measured."""

    most: int
    alone: Callable[[int], float]
    _rows: CostCurve = field(default_factory=lambda: CostCurve(proportional=True))
    _per_part: float = 0.0  # seconds, for each token of its context
    _per_token: float = 0.0  # the same, for each token of a part
    _error: float = 1.0  # what parts add, over what was foretold

    def measure_rows(self, rows: int, seconds: float) -> None:
        """A pass of so many rows without a context took so long."""
        self._rows.observe(rows, seconds)

    def measure_context(self, context: int, one: float, many: float, tokens: int) -> None:
        """Behind `context` tokens a pass of one took `one` seconds, and one of `tokens` `many`."""
        first = max(0.0, one - self._rows.seconds(1)) / context
        last = max(0.0, many - self._rows.seconds(tokens)) / context
        self._per_token = max(0.0, last - first) / (tokens - 1)
        self._per_part = max(0.0, first - self._per_token)

    def parts(self, rows: int, prompts: Sequence[SessionView]) -> list[int]:
        """How many tokens of the first prompts share a pass with `rows` others; one of the first
        in any case."""
        alone = self.alone(rows)
        left = self.most
        one = self._error * self._adds(rows, [(1, prompt.context) for prompt in prompts[:1]])
        together = self.alone(rows + max(0, len(prompts) - 1))
        limit = max(_BEYOND * one if one > alone else 0.0, STRETCH * together - alone)
        chosen: list[Part] = []
        for prompt in prompts:

            def adds(tokens: int, context: int = prompt.context) -> float:
                return self._error * self._adds(rows, [*chosen, (tokens, context)])

            most = min(left, prompt.pending)
            tokens = max(bisect_right(range(1, most + 1), limit, key=adds), not chosen)
            if tokens:
                chosen.append((tokens, prompt.context))
            left -= tokens
            if tokens < prompt.pending or not left:
                break
        return [tokens for tokens, _ in chosen]

    def foretold(self, rows: int, parts: Sequence[Part]) -> float | None:
        """Seconds of a pass of `rows` and these parts; None while nothing was measured."""
        return self.alone(rows) + self._error * self._adds(rows, parts) or None

    def observe(self, rows: int, parts: Sequence[Part], seconds: float) -> None:
        """A pass of `rows` and these parts took so long."""
        alone, foretold = self.alone(rows), self._adds(rows, parts)
        if alone <= 0 or foretold <= 0:
            return
        error = min(max((seconds - alone) / foretold, _LEAST_ERROR), _MOST_ERROR)
        # What hardly lengthens a pass cannot be told from its noise.
        weight = _WEIGHT * min(1.0, self._error * foretold / alone)
        self._error += weight * (error - self._error)

    def _adds(self, rows: int, parts: Sequence[Part]) -> float:
        """Seconds that these parts are to add to a pass of `rows`."""
        more = sum(tokens for tokens, _ in parts)
        reading = sum(
            context * (self._per_part + self._per_token * tokens) for tokens, context in parts
        )
        return max(0.0, self._rows.seconds(rows + more) - self._rows.seconds(rows)) + reading
