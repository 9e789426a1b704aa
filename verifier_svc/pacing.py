"""How many prompt tokens share a pass with sessions that decode. Pure policy.

Whoever streams should not notice that somebody else's long prompt has arrived: a pass with parts of
prompts may take `STRETCH` times as long as one without, and parts are as long as that allows. Where
several prompts wait, it may take that many times what a pass would if all but one of them were read
and decoding, as they are about to: else the few who decode would hold up the many who wait, and
weights would be read for few rows again and again. What parts add is foretold before they are run,
from what was measured at start: the pass has more rows, and attention reads the context of each
part, a little once and the rest for each of its tokens. By how much that is wrong, and what it
takes that there is a part at all, is learned from every such pass. What a pass takes without parts
was learned before they came; while a long prompt is read, those who decode get longer contexts,
which are allowed for in the same way.
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
# Of all passes before, at each pass with parts; what is not yet known has the weight of so many.
_FORGET, _PRIOR = 0.1, 3.0
# What is less or more of what was foretold is not due to the parts.
_LEAST_ERROR, _MOST_ERROR = 0.5, 3.0
_MOST_FIXED = 0.4  # half of what the bound leaves, or a disturbed machine would hardly read
# A pass that is further off than this part of one without parts was disturbed by something else.
_DISTURBED = 1.0

_CONTEXT_WEIGHT = 0.1  # of a pass, in the running mean of the contexts in it
_LEAST_ALONE = 0.25  # of what was learned, however much shorter contexts are now

Part = tuple[int, int]  # tokens of a prompt, and of its context before them


@dataclass(slots=True)
class _Error:
    """What parts add, as `fixed + factor * foretold`: the line of the least squares, by which more
    recent ones weigh more, and fixed = 0, factor = 1 count as `_PRIOR` passes that parts double.
    All in multiples of a pass without parts. With a factor alone, small parts would look so dear
    by what is fixed that they stayed small."""

    fixed: float = 0.0
    factor: float = 1.0
    _sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x * x, x * y

    def observe(self, x: float, y: float) -> None:
        """x was foretold, and y came."""
        expected = self.fixed + self.factor * x
        y = min(max(y, expected - _DISTURBED), expected + _DISTURBED)
        terms = (1.0, x, y, x * x, x * y)
        self._sums = tuple(
            (1 - _FORGET) * old + new for old, new in zip(self._sums, terms, strict=True)
        )
        n, sx, sy, sxx, sxy = self._sums
        n, sxx, sxy = n + _PRIOR, sxx + _PRIOR, sxy + _PRIOR
        fixed = (sy * sxx - sx * sxy) / (n * sxx - sx * sx)
        self.fixed = min(max(fixed, 0.0), _MOST_FIXED)
        self.factor = min(max((sxy - self.fixed * sx) / sxx, _LEAST_ERROR), _MOST_ERROR)


@dataclass(slots=True)
class PrefillPace:
    """`most` tokens in a pass at most; `step_seconds` tells what passes of so many rows took of
    late. Nothing else bounds the parts where nothing was measured. `decoding` are the contexts of
    those who decode."""

    most: int
    step_seconds: Callable[[int], float]
    _rows: CostCurve = field(default_factory=lambda: CostCurve(proportional=True))
    _per_part: float = 0.0  # seconds, for each token of its context
    _per_token: float = 0.0  # the same, for each token of a part
    _context: float = 0.0  # of those who decode, in passes without parts
    _error: _Error = field(default_factory=_Error)

    def measure_rows(self, rows: int, seconds: float) -> None:
        """A pass of so many rows without a context took so long."""
        self._rows.observe(rows, seconds)

    def measure_context(self, context: int, one: float, many: float, tokens: int) -> None:
        """Behind `context` tokens a pass of one took `one` seconds, and one of `tokens` `many`."""
        first = max(0.0, one - self._rows.seconds(1)) / context
        last = max(0.0, many - self._rows.seconds(tokens)) / context
        self._per_token = max(0.0, last - first) / (tokens - 1)
        self._per_part = max(0.0, first - self._per_token)

    def parts(
        self, rows: int, decoding: Sequence[int], prompts: Sequence[SessionView]
    ) -> list[int]:
        """How many tokens of the first prompts share a pass with `rows` others; one of the first
        in any case."""
        alone = self._alone(rows, decoding)
        left = self.most
        one = self._corrected(alone, self._adds(rows, [(1, each.context) for each in prompts[:1]]))
        together = self._alone(rows + max(0, len(prompts) - 1), decoding)
        limit = max(_BEYOND * one if one > alone else 0.0, STRETCH * together - alone)
        chosen: list[Part] = []
        for prompt in prompts:

            def adds(tokens: int, context: int = prompt.context) -> float:
                return self._corrected(alone, self._adds(rows, [*chosen, (tokens, context)]))

            most = min(left, prompt.pending)
            tokens = max(bisect_right(range(1, most + 1), limit, key=adds), not chosen)
            if tokens:
                chosen.append((tokens, prompt.context))
            left -= tokens
            if tokens < prompt.pending or not left:
                break
        return [tokens for tokens, _ in chosen]

    def foretold(self, rows: int, decoding: Sequence[int], parts: Sequence[Part]) -> float | None:
        """Seconds of a pass of `rows` and these parts; None while nothing was measured."""
        alone, adds = self._alone(rows, decoding), self._adds(rows, parts)
        return alone + (self._corrected(alone, adds) if parts else 0.0) or None

    def observe_alone(self, decoding: Sequence[int]) -> None:
        """`step_seconds` has learned from a pass without parts."""
        mean = sum(decoding) / len(decoding)
        self._context += _CONTEXT_WEIGHT * (mean - self._context)

    def observe(
        self, rows: int, decoding: Sequence[int], parts: Sequence[Part], seconds: float
    ) -> None:
        """A pass of `rows` and these parts took so long."""
        alone, foretold = self._alone(rows, decoding), self._adds(rows, parts)
        if alone > 0:
            self._error.observe(foretold / alone, seconds / alone - 1)

    def _corrected(self, alone: float, adds: float) -> float:
        """Seconds that parts add of which so many are foretold."""
        return self._error.fixed * alone + self._error.factor * adds

    def _alone(self, rows: int, decoding: Sequence[int]) -> float:
        """Seconds of a pass without parts."""
        learned = self.step_seconds(rows)
        more = sum(context - self._context for context in decoding)
        return max(learned + more * (self._per_part + self._per_token), _LEAST_ALONE * learned)

    def _adds(self, rows: int, parts: Sequence[Part]) -> float:
        """Seconds that these parts are to add to a pass of `rows`."""
        more = sum(tokens for tokens, _ in parts)
        reading = sum(
            context * (self._per_part + self._per_token * tokens) for tokens, context in parts
        )
        return max(0.0, self._rows.seconds(rows + more) - self._rows.seconds(rows)) + reading
