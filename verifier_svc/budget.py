"""How many nodes a tree may have: the number that commits most tokens per second, by measurement.

Speed with n nodes for each of S sessions = S * (1 + gain(n)) / (draft(n, S) + step(S * (n + 1))):
- gain(n): accepted tokens of a tree's n best nodes, a running mean. One verified tree tells the
  gain of every smaller one as well, since trimming keeps the best nodes.
- draft(n, S): seconds from asking for n nodes to their arrival, when S sessions ask at once.
- step(rows): seconds of a pass, measured at start and refined by every pass.
With n = 0 this is plain decoding, so speculation is used only where it pays. The rows of all
sessions are paid for, so trees shrink as sessions join, and to nothing where rows have become
dear. Of the trees that arrive only the nodes are verified whose calibrated probability is worth
their row, by one threshold for all sessions; n in step(...) is what is left of it. What has not
been tried is assumed to be good, and now and then another number than the best is asked for.

While prompts are read, passes have their rows as well, and what trees add to a pass holds up all.
So the n is best whose tokens exceed most what the same time would bring without prompts. Where rows
are dear already, as on a CPU, that takes better trees than otherwise; where they are nearly free,
prompts change nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.tree import MAX_ROWS, DraftTree
from verifier_svc.calibration import Calibration
from verifier_svc.catching_up import CatchingUp, Gap
from verifier_svc.costs import CostCurve

SIZES = (1, 2, 3, 5, 7, 11, 15, 31, 63)
# Of a walk in the running mean of the gain, at least: walks are coin tosses, and their mean must
# not toss between plain and speculative decoding.
_WALK_WEIGHT = 0.01
# The gain of a size that was not tried yet is so much, or all of its nodes, with the weight of so
# many walks: few trees are enough to see that it is less, while too little would not be seen.
_HOPE, _HOPE_WALKS = 4.0, 2
# Every so many passes another size than the best is tried, or, from plain decoding, trees at all:
# sooner for the first times, and more rarely where that would cost a larger share of the tokens.
_EXPLORE_FIRST, _EXPLORE_EVERY = 8, 48
_EXPLORE_LOSS = 0.005
# When plain decoding looks whether trees would pay, it verifies so many of each session. They may
# take longer to come, as their drafter has to catch up first, but not for ever.
_TRIAL_TREES, _TRIAL_PASSES = 5, 24
_WORSE = 0.1  # they end when the loss turns out to be that much more
# A plain pass among trees is followed by another one while each makes plain decoding look so much
# faster.
_FASTER = 1.01
# A tree must promise that much more than plain decoding, as estimates are noisy. Where trees are
# granted already they need only be no slower, or a load that sways would toss between the two.
_MARGIN = 1.03
_SEEN = 32  # walks after which a gain is a measurement
# No node is ever asked for more than this probability: the threshold is an estimate.
_MOST_ASKED = 0.8


@dataclass(frozen=True, slots=True)
class Grant:
    nodes: int  # 0: decode plainly
    sessions: int  # that are granted trees at once
    once: bool = False  # plainly for this pass alone: trees are wanted again after it


@dataclass(slots=True)
class _Trial:
    """What is still to come of it."""

    nodes: int = 0
    passes: int = 0  # left, at most
    walks: int = 0  # of all trees until it ends
    loss: float = 0.0  # as expected


@dataclass(slots=True)
class Budget:
    """`most` nodes at most, and `row_budget` rows of all trees of a pass."""

    most: int
    row_budget: int
    adaptive: bool = True  # False: as many nodes as there is room for, always
    calibration: Calibration = field(default_factory=Calibration)
    catching_up: CatchingUp = field(default_factory=CatchingUp)
    _sizes: tuple[int, ...] = field(init=False)
    _gain: dict[int, float] = field(init=False)
    _verified: dict[int, float] = field(init=False)  # nodes that are left of a tree's n
    _walks: dict[int, int] = field(init=False)
    _draft: dict[int, CostCurve] = field(init=False)
    _steps: CostCurve = field(default_factory=lambda: CostCurve(proportional=True))
    _levels: tuple[float, ...] = ()
    _all_walks: int = 0
    _granted: Grant = Grant(0, 0)
    _reading: int = 0  # tokens of prompts in the pass that was granted for
    _left: int = 0  # grants until the next choice
    _saved: float = 0.0  # seconds per token, by the fastest trees
    _saved_beside: float = 0.0  # the same, while prompts are read
    _speculating: bool = False
    _unexplored: int = 0  # grants since another size was tried
    _round: int = 0
    _trial: _Trial = field(default_factory=_Trial)
    _plain: tuple[int, float] = (0, 0.0)  # sessions, and their speed before a plain pass was tried

    def __post_init__(self) -> None:
        self._sizes = (*(size for size in SIZES if size < self.most), self.most)
        self._gain = {size: min(size, _HOPE) for size in self._sizes}
        self._verified = {size: float(size) for size in self._sizes}
        self._walks = dict.fromkeys(self._sizes, 0)
        self._draft = {size: CostCurve(proportional=False) for size in self._sizes}

    # ---- measurements ------------------------------------------------------

    def observe_step(self, rows: int, seconds: float) -> None:
        """A pass of so many rows, without prefill, took so long."""
        self._steps.observe(rows, seconds)
        self._left = 0

    def observe_draft(self, grant: Grant, seconds: float) -> None:
        """A tree came that long after it was asked for."""
        if grant.nodes in self._draft:
            self._draft[grant.nodes].observe(grant.sessions, seconds)

    def observe_levels(self, seconds: Sequence[float]) -> None:
        """A drafter says how long each level of its last trees took."""
        if all(0.0 <= each < math.inf for each in seconds):
            self._levels = tuple(seconds)

    def observe_walk(
        self, tree: DraftTree, accepted: Sequence[int], verified: int | None = None
    ) -> None:
        """`accepted` are the rows of a drafted tree whose tokens were committed, root's child
        first; `verified` of its nodes were in the pass (None: all)."""
        left = len(tree) if verified is None else verified
        ranked = sorted(range(len(tree)), key=lambda node: (-tree.scores[node], node))
        self._all_walks += 1
        rank = {node + 1: place for place, node in enumerate(ranked)}
        for size in self._sizes:
            if size > len(tree) and size != self._smallest_above(len(tree)):
                continue
            gain = sum(rank[row] < size for row in accepted)
            self._walks[size] += 1
            weight = max(_WALK_WEIGHT, 1 / (self._walks[size] + _HOPE_WALKS))
            self._gain[size] += weight * (gain - self._gain[size])
            # Nearly the best ones by score, too, so of a smaller tree as many would be left.
            self._verified[size] += weight * (min(size, left) - self._verified[size])

    def _smallest_above(self, nodes: int) -> int:
        return next((size for size in self._sizes if size >= nodes), self.most)

    # ---- what they foretell ------------------------------------------------

    def gain(self, nodes: int) -> float:
        """Tokens that are accepted of a tree of so many nodes, at least one."""
        # A larger tree holds the smaller one, whatever few walks say of it.
        return max(self._gain[size] for size in self._sizes if size <= nodes)

    def step_seconds(self, rows: int) -> float:
        """Of a pass with so many rows; 0 while nothing has been measured."""
        return self._steps.seconds(rows)

    def draft_seconds(self, nodes: int, sessions: int) -> float:
        """From asking for trees of so many nodes for so many sessions to their arrival."""
        # A larger tree does not come sooner than a smaller one, and not before its levels are run,
        # of which there is at least one, and at most one per node.
        tried = [self._draft[size].seconds(sessions) for size in self._sizes if size <= nodes]
        return tried[-1] or max(*tried, sum(self._levels[:nodes]))

    def speed(self, nodes: int, decoding: int) -> float:
        """Expected tokens per second of `decoding` sessions with trees of `nodes` nodes."""
        if nodes == 0:
            return decoding / max(self.step_seconds(decoding), 1e-9)
        seconds = self.step_seconds(round(decoding * (self._verified[nodes] + 1)))
        seconds += self.draft_seconds(nodes, decoding)
        return decoding * (1 + self.gain(nodes)) / max(seconds, 1e-9)

    def advantage(self, decoding: int) -> float:
        """How many times as fast as plain decoding the best trees are. Until some were measured
        that is infinite: nobody knows before they are tried."""
        sizes = self._fitting(decoding)
        if not sizes or not self.adaptive:
            return 0.0
        if max(self._walks.values()) < _SEEN:
            return math.inf
        return max(self.speed(size, decoding) for size in sizes) / self.speed(0, decoding)

    def cap(self, decoding: int) -> int:
        """Nodes for each of `decoding` sessions that the rows of one pass have room for."""
        return min(self.row_budget // max(1, decoding), MAX_ROWS) - 1

    def _fitting(self, decoding: int) -> list[int]:
        cap = self.cap(decoding)
        return [size for size in self._sizes if size <= cap]

    def worthwhile(self, tree: DraftTree) -> DraftTree:
        """What of an arrived tree is worth verifying."""
        least = self._least()
        chances = self.calibration.probabilities(tree) if least else []
        kept = [node for node, chance in enumerate(chances) if chance >= least]
        return tree.keeping(kept) if least and len(kept) < len(tree) else tree

    def _least(self) -> float:
        """The probability that pays for a node's row: the tokens that all sessions commit in the
        time that a row more takes, on average over the rows of whole trees."""
        nodes, decoding = self._granted.nodes, self._granted.sessions
        if not self.adaptive or nodes == 0:
            return 0.0
        added, rows = decoding * nodes, decoding + self._reading
        dearer = self.step_seconds(rows + added) - self.step_seconds(rows)
        return min(max(0.0, self.speed(nodes, decoding) * dearer / added), _MOST_ASKED)

    # ---- the choice --------------------------------------------------------

    def choose(self, decoding: int, reading: int = 0, gap: Gap | None = None) -> Grant:
        """For one of `decoding` sessions, beside others of whose prompts a pass reads about
        `reading` tokens; `gap` is what its drafter lacks, if it does. All sessions of a pass are
        granted the same, for their trees are drafted together, so what trees of a size take is
        known only where all are of it; but not those whose drafters would catch up in vain."""
        decoding = max(1, decoding)
        self.catching_up.committed(decoding, bool(reading))
        sizes = self._fitting(decoding)
        if not sizes:
            return Grant(0, decoding, once=bool(reading))
        if not self.adaptive:
            return Grant(sizes[-1], decoding)
        self._unexplored += not reading
        if self._left == 0 or (self._granted.sessions, self._reading) != (decoding, reading):
            self._left, self._reading = decoding, reading
            nodes = (
                self._best_beside(sizes, decoding, reading)
                if reading
                else self._next(sizes, decoding)
            )
            once = not nodes and (self._speculating or bool(reading))
            self._granted = Grant(nodes, decoding, once)
        self._left -= 1
        settled = self._speculating or reading  # no trial of trees
        saved = self._saved, self._saved_beside
        if gap is not None and settled and not self.catching_up.pays(gap, *saved):
            return Grant(0, decoding, once=True)
        return self._granted

    def _best_beside(self, sizes: Sequence[int], decoding: int, reading: int) -> int:
        """The number that wins most tokens while prompts are read."""
        rows = decoding + reading
        otherwise = max(self.speed(size, decoding) for size in (0, *sizes))

        def won(nodes: int) -> float:
            added = self.step_seconds(round(rows + decoding * self._verified[nodes]))
            longer = added - self.step_seconds(rows) + self.draft_seconds(nodes, decoding)
            return decoding * self.gain(nodes) - otherwise * longer

        best = max(sizes, key=won)
        if won(best) <= (_MARGIN - 1) * decoding:
            self._saved_beside = 0.0
            return 0
        self._saved_beside = won(best) / otherwise / (decoding * (1 + self.gain(best)))
        return best

    def _next(self, sizes: Sequence[int], decoding: int) -> int:
        """The best number, or for a pass or a few another one."""
        nodes = self._best(sizes, decoding)
        trial = self._trial
        if nodes == 0 and trial.passes and self._all_walks < trial.walks:
            tried = min(trial.nodes, sizes[-1])
            trial.passes -= 1
            self._unexplored = 0
            if self._loss(tried, nodes, decoding) < trial.loss + _WORSE:
                return tried
        trial.passes = 0
        tried, before = self._plain
        if nodes and tried == decoding and self.speed(0, decoding) > _FASTER * before:
            self._plain = (decoding, self.speed(0, decoding))
            return 0
        self._plain = (0, 0.0)
        every = min(_EXPLORE_FIRST * (self._round + 1), _EXPLORE_EVERY)
        other = self._other(nodes, sizes, decoding)
        if self._unexplored < every * decoding:
            return nodes
        trees = 1 if nodes else _TRIAL_TREES
        loss = self._loss(other, nodes, decoding)
        lost = trees * loss  # tokens of each session
        if not nodes:
            lost += self.catching_up.usual_seconds * self.speed(0, decoding)
        if self._unexplored < lost / _EXPLORE_LOSS * decoding:
            return nodes
        self._unexplored = 0
        self._round += 1
        if other == 0:
            self._plain = (decoding, self.speed(0, decoding))
        if nodes == 0:
            until = self._all_walks + _TRIAL_TREES * decoding
            self._trial = _Trial(other, _TRIAL_PASSES, until, loss)
        return other

    def _other(self, nodes: int, sizes: Sequence[int], decoding: int) -> int:
        """Another number than `nodes`, the best one, to be tried next: from plain decoding the best
        of trees; else by turns the largest, whose trees tell of all others, one of the others, and
        none, since what plain passes take is not seen while there are trees."""
        others = [size for size in sizes if size != nodes]
        if nodes == 0:
            return max(others, key=lambda size: self.speed(size, decoding))
        turn, kind = divmod(self._round, 3)
        if kind == 0 or not others:
            return 0
        return others[-1 if kind == 1 else turn % len(others)]

    def _loss(self, nodes: int, best: int, decoding: int) -> float:
        """Share of the tokens that a pass with `nodes` nodes costs; nothing, where it pays."""
        return max(0.0, 1 - self.speed(nodes, decoding) / self.speed(best, decoding))

    def _best(self, sizes: Sequence[int], decoding: int) -> int:
        """The number that promises most."""
        best = max(sizes, key=lambda size: self.speed(size, decoding))
        fastest, plain = self.speed(best, decoding), self.speed(0, decoding)
        margin = 1.0 if self._speculating else _MARGIN
        self._speculating = fastest > margin * plain
        self._saved = 1 / plain - 1 / fastest
        return best if self._speculating else 0
