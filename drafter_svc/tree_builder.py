"""How draft trees grow, without a model; and the dynamic policy (EAGLE-2, arXiv 2406.16858).

A tree grows level by level. All candidates are remembered in the order in which they came up, so a
parent is always before its children, and ranking is stable: among equal scores the earlier wins.
Hence the N best are connected, and listed best first they are listed parent first.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coppice.tree import MAX_ROWS, DraftTree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

ROOT = -1  # in place of a candidate's index


def best_tree(
    tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], nodes: int
) -> DraftTree:
    """The `nodes` best of all candidates. `parents` are indices of earlier candidates or ROOT, and
    no score (a cumulative log-probability) is above the parent's."""
    order = _ranking(np.asarray(scores, dtype=np.float32))[:nodes].tolist()
    row = {ROOT: 0} | {candidate: index for index, candidate in enumerate(order, start=1)}
    return DraftTree(
        tuple(tokens[candidate] for candidate in order),
        tuple(row[parents[candidate]] for candidate in order),
        tuple(scores[candidate] for candidate in order),
    )


def _ranking(scores: Floats) -> Ints:
    return np.argsort(-scores, kind="stable")


def forwarded_at_most(nodes: int, top_k: int, depth: int) -> int:
    """How many nodes of a tree are ever in a frontier; see `CandidateTree._hopeful`."""
    return min(top_k, nodes - 1) * (min(depth, nodes) - 1) if nodes > 0 else 0


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of a level whose children are asked for, likeliest first."""

    tokens: Ints  # [nodes]
    parents: Ints  # [nodes] row of each node's parent in the frontier before
    masks: Ints  # [nodes] 64-bit words: bit j = the j-th node ever in a frontier is an ancestor
    level: int  # of the nodes; the root's children are 1

    def __len__(self) -> int:
        return len(self.tokens)


class CandidateTree(ABC):
    """One session's tree while it is grown. The root is the first frontier."""

    def __init__(self, nodes: int) -> None:
        """`nodes`: of the finished tree at most."""
        self._nodes = nodes
        self._level = 0
        self._forwarded = 0
        self._frontier_scores: Floats = np.zeros(1, np.float32)
        self._frontier_candidates: Ints = np.full(1, ROOT, np.int64)
        self._frontier_masks: npt.NDArray[np.uint64] = np.zeros(1, np.uint64)
        self._tokens: Ints = np.empty(0, np.int64)
        self._parents: Ints = np.empty(0, np.int64)
        self._scores: Floats = np.empty(0, np.float32)

    @abstractmethod
    def extend(self, tokens: Ints, log_probs: Floats) -> Frontier:
        """Takes the best children of every frontier node, likeliest first, tokens and
        log-probabilities [frontier, children], and returns the next frontier; an empty one ends
        the tree."""

    def finished(self) -> DraftTree:
        """The N best of all candidates, parent first."""
        return best_tree(
            self._tokens.tolist(), self._parents.tolist(), self._scores.tolist(), self._nodes
        )

    def _remember(self, tokens: Ints, log_probs: Floats, wanted: Bools) -> tuple[Ints, Ints]:
        """Makes candidates of the `wanted` children; their rows and columns [candidates]."""
        # A predicted NaN or infinity proposes nothing. Clamped, since rounding can lift a
        # log-probability above 0 and with it a child above its parent.
        row, column = np.nonzero(wanted & np.isfinite(log_probs))
        scores = self._frontier_scores[row] + np.minimum(log_probs[row, column], np.float32(0.0))
        self._tokens = np.concatenate((self._tokens, tokens[row, column]))
        self._parents = np.concatenate((self._parents, self._frontier_candidates[row]))
        self._scores = np.concatenate((self._scores, scores))
        self._level += 1
        return row, column

    def _hopeful(self, count: int) -> Ints:
        """Which of the last `count` candidates can have children in the finished tree, likeliest
        first. One that is not among the N - 1 best so far leaves no room for a child, now or
        later, so it is not forwarded: the tree is the same, and small ones end early."""
        first = len(self._tokens) - count
        best = _ranking(self._scores)[: self._nodes - 1]
        return best[best >= first] - first

    def _advance(self, chosen: Ints, rows: Ints) -> Frontier:
        """Makes `chosen` (indices into this level's candidates, whose parents are `rows` of the
        frontier) the new frontier."""
        first = len(self._tokens) - len(rows)
        parents = rows[chosen]
        own = np.arange(self._forwarded, self._forwarded + len(chosen), dtype=np.uint64)
        masks = self._frontier_masks[parents] | np.uint64(1) << own
        self._forwarded += len(chosen)
        self._frontier_candidates = first + chosen
        self._frontier_scores = self._scores[self._frontier_candidates]
        self._frontier_masks = masks
        tokens = self._tokens[self._frontier_candidates]
        return Frontier(tokens, parents, masks.view(np.int64), self._level)


class GrowingTree(CandidateTree):
    """The dynamic tree of EAGLE-2."""

    def __init__(self, nodes: int, top_k: int, depth: int) -> None:
        """At most `nodes` nodes in `depth` levels, `top_k` nodes in a frontier."""
        super().__init__(nodes)
        self._top_k = top_k
        self._depth = depth

    def extend(self, tokens: Ints, log_probs: Floats) -> Frontier:
        row, _ = self._remember(tokens, log_probs, np.ones(log_probs.shape, np.bool_))
        if self._level == self._depth:
            return self._advance(np.empty(0, np.int64), row)
        return self._advance(self._hopeful(len(row))[: self._top_k], row)


class TreePolicy(Protocol):
    """The shape that trees are to have."""

    @property
    def children(self) -> int:
        """How many children of a frontier node are asked for."""
        ...

    def forwarded_at_most(self, nodes: int) -> int:
        """How many of a tree's nodes are ever in a frontier; no more than a mask has bits."""
        ...

    def new_tree(self, nodes: int) -> CandidateTree:
        """A tree of at most `nodes` nodes, to be grown."""
        ...


@dataclass(frozen=True, slots=True)
class DynamicPolicy:
    """Trees that follow the scores: at most `depth` levels, `top_k` nodes in a frontier."""

    top_k: int
    depth: int

    def __post_init__(self) -> None:
        if self.top_k * (self.depth - 1) > MAX_ROWS:
            raise ValueError(
                f"top_k {self.top_k} * (depth {self.depth} - 1): must be at most {MAX_ROWS}"
            )

    @property
    def children(self) -> int:
        return self.top_k

    def forwarded_at_most(self, nodes: int) -> int:
        return forwarded_at_most(nodes, self.top_k, self.depth)

    def new_tree(self, nodes: int) -> GrowingTree:
        return GrowingTree(nodes, self.top_k, self.depth)
