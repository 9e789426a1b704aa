"""The policy of the dynamic draft tree, without a model (EAGLE-2, arXiv 2406.16858).

A tree grows level by level. All candidates are remembered in the order in which they came up, so a
parent is always before its children, and ranking is stable: among equal scores the earlier wins.
Hence the N best are connected, and listed best first they are listed parent first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.tree import DraftTree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

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
    """How many nodes of a tree are ever in a frontier; see `GrowingTree.extend`."""
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


class GrowingTree:
    """One session's tree while it is grown. The root is the first frontier."""

    def __init__(self, nodes: int, top_k: int, depth: int) -> None:
        """At most `nodes` nodes in `depth` levels, `top_k` nodes in a frontier."""
        self._nodes = nodes
        self._top_k = top_k
        self._depth = depth
        self._level = 0
        self._forwarded = 0
        self._frontier_scores: Floats = np.zeros(1, np.float32)
        self._frontier_candidates: Ints = np.full(1, ROOT, np.int64)
        self._frontier_masks: npt.NDArray[np.uint64] = np.zeros(1, np.uint64)
        self._tokens: Ints = np.empty(0, np.int64)
        self._parents: Ints = np.empty(0, np.int64)
        self._scores: Floats = np.empty(0, np.float32)

    def extend(self, tokens: Ints, log_probs: Floats) -> Frontier:
        """Takes the best children of every frontier node, tokens and log-probabilities [frontier,
        children], and returns the next frontier; an empty one ends the tree.

        A candidate that is not among the N - 1 best so far leaves no room for a child, now or
        later, so it is not forwarded: the tree is the same, and small ones end early.
        """
        first = len(self._tokens)
        # A predicted NaN or infinity proposes nothing. Clamped, since rounding can lift a
        # log-probability above 0 and with it a child above its parent.
        row, column = np.nonzero(np.isfinite(log_probs))
        scores = self._frontier_scores[row] + np.minimum(log_probs[row, column], np.float32(0.0))
        self._tokens = np.concatenate((self._tokens, tokens[row, column]))
        self._parents = np.concatenate((self._parents, self._frontier_candidates[row]))
        self._scores = np.concatenate((self._scores, scores))
        self._level += 1
        if self._level == self._depth:
            return self._advance(np.empty(0, np.int64), row)
        best = _ranking(self._scores)[: self._nodes - 1]
        return self._advance(best[best >= first][: self._top_k] - first, row)

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

    def finished(self) -> DraftTree:
        """The N best of all candidates, parent first."""
        return best_tree(
            self._tokens.tolist(), self._parents.tolist(), self._scores.tolist(), self._nodes
        )
