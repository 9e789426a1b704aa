"""How many nodes a tree may have: the number that commits most tokens per second, by measurement.

Speed with n nodes for each of S sessions = S * (1 + gain(n)) / (draft(n) + step(S * (n + 1))):
- gain(n): accepted tokens of a tree's n best nodes, a running mean. One verified tree tells the
  gain of every smaller one as well, since trimming keeps the best nodes.
- draft(n): seconds from asking for n nodes to their arrival, a running mean.
- step(rows): seconds of a pass, measured at start and refined by every pass.
With n = 0 this is plain decoding, so speculation is used only where it pays. What has not been
tried is assumed to be good, and now and then another number than the best is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.tree import MAX_ROWS, DraftTree

SIZES = (1, 2, 3, 5, 7, 11, 15, 31, 63)
_WEIGHT = 0.1
# Of a walk in the running mean of the gain, at least: walks are coin tosses, and their mean must
# not toss between plain and speculative decoding.
_WALK_WEIGHT = 0.02
# Every so many grants of each session another size than the best is tried, or, from plain
# decoding, a tree at all.
_EXPLORE_EVERY = 48
_FEW_ROWS = 8  # that are told apart
# A tree must promise that much more than plain decoding, as estimates are noisy.
_MARGIN = 1.03


@dataclass(frozen=True, slots=True)
class Grant:
    nodes: int  # 0: decode plainly
    trial: bool = False  # from plain decoding: worth more than one tree, as the first comes late


@dataclass(slots=True)
class Budget:
    """`most` nodes at most, and `row_budget` rows of all trees of a pass."""

    most: int
    row_budget: int
    adaptive: bool = True  # False: as many nodes as there is room for, always
    _sizes: tuple[int, ...] = field(init=False)
    _gain: dict[int, float] = field(init=False)
    _walks: dict[int, int] = field(init=False)
    _draft: dict[int, float] = field(init=False)
    _steps: dict[int, float] = field(default_factory=dict[int, float])
    _grants: int = 0

    def __post_init__(self) -> None:
        self._sizes = (*(size for size in SIZES if size < self.most), self.most)
        self._gain = {size: min(size, 2.0) for size in self._sizes}
        self._walks = dict.fromkeys(self._sizes, 0)
        self._draft = dict.fromkeys(self._sizes, 0.0)

    # ---- measurements ------------------------------------------------------

    def observe_step(self, rows: int, seconds: float) -> None:
        """A pass of so many rows, without prefill, took so long."""
        bucket = _bucket(rows)
        known = self._steps.get(bucket, seconds)
        self._steps[bucket] = known + _WEIGHT * (seconds - known)

    def observe_draft(self, granted: int, seconds: float) -> None:
        """A tree came that long after it was asked for."""
        if granted in self._draft:
            known = self._draft[granted] or seconds
            self._draft[granted] = known + _WEIGHT * (seconds - known)

    def observe_walk(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """`accepted` are the rows of the tree whose tokens were committed, root's child first."""
        ranked = sorted(range(len(tree)), key=lambda node: (-tree.scores[node], node))
        rank = {node + 1: place for place, node in enumerate(ranked)}
        for size in self._sizes:
            if size > len(tree) and size != self._smallest_above(len(tree)):
                continue
            gain = sum(rank[row] < size for row in accepted)
            self._walks[size] += 1
            weight = max(_WALK_WEIGHT, 1 / (self._walks[size] + 1))
            self._gain[size] += weight * (gain - self._gain[size])

    def _smallest_above(self, nodes: int) -> int:
        return next((size for size in self._sizes if size >= nodes), self.most)

    # ---- the choice --------------------------------------------------------

    def step_seconds(self, rows: int) -> float:
        """Of a pass with so many rows; 0 while nothing has been measured."""
        bucket = _bucket(rows)
        if bucket in self._steps or not self._steps:
            return self._steps.get(bucket, 0.0)
        # Between and beyond what was measured a pass costs as its nearest larger, or in
        # proportion to its rows.
        larger = [known for known in self._steps if known > bucket]
        if larger:
            return self._steps[min(larger)]
        largest = max(self._steps)
        return self._steps[largest] * bucket / largest

    def speed(self, nodes: int, decoding: int) -> float:
        """Expected tokens per second of `decoding` sessions with trees of `nodes` nodes."""
        seconds = self.step_seconds(decoding * (nodes + 1))
        if nodes == 0:
            return decoding / max(seconds, 1e-9)
        # A larger tree holds the smaller one, whatever few walks say of it.
        gain = max(self._gain[size] for size in self._sizes if size <= nodes)
        return decoding * (1 + gain) / max(seconds + self._draft[nodes], 1e-9)

    def cap(self, decoding: int) -> int:
        """Nodes for each of `decoding` sessions that the rows of one pass have room for."""
        return min(self.row_budget // max(1, decoding), MAX_ROWS) - 1

    def choose(self, decoding: int) -> Grant:
        """For one of `decoding` sessions."""
        sizes = [size for size in self._sizes if size <= self.cap(decoding)]
        if not sizes:
            return Grant(0)
        if not self.adaptive:
            return Grant(sizes[-1])
        self._grants += 1
        rounds, rest = divmod(self._grants, _EXPLORE_EVERY * max(1, decoding))
        best = max(sizes, key=lambda size: self.speed(size, decoding))
        pays = self.speed(best, decoding) > _MARGIN * self.speed(0, decoding)
        if rest:
            return Grant(best if pays else 0)
        if not pays:
            return Grant(best, trial=True)
        place = sizes.index(best) + (1 if rounds % 2 else -1)
        return Grant(sizes[min(max(place, 0), len(sizes) - 1)])


def _bucket(rows: int) -> int:
    """Many rows are taken together with all up to the next power of two."""
    return rows if rows <= _FEW_ROWS else 1 << (rows - 1).bit_length()
