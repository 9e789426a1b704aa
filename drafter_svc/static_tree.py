"""The policy of a static draft tree: which children are drafted is laid down by rank beforehand.

A path is a sequence of ranks: (0, 2) is the third likeliest child of the root's likeliest.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from coppice.tree import MAX_ROWS
from drafter_svc.tree_builder import CandidateTree, Floats, Frontier, Ints

RankPath = tuple[int, ...]


def paths(*ranks: str) -> frozenset[RankPath]:
    """Each word is a path, a digit for each rank."""
    return frozenset(tuple(int(rank) for rank in word) for words in ranks for word in words.split())


# EAGLE-1 (Li et al. 2024, arXiv 2401.15077): 26 rows with the root, chosen for a 7B model.
EAGLE_PATHS = paths(
    "0 1 2 3",
    "00 01 02 10 11 20 21 30",
    "000 001 002 010 011 020 021 100",
    "0000 0001 0002",
    "00000 00001",
)
# Medusa (Cai et al. 2024, arXiv 2401.10774): 64 rows with the root, chosen for a 7B model.
MEDUSA_PATHS = paths(
    "0 1 2 3 4 5 6 7 8 9",
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90",
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200",
    "0000 0001",
)


class StaticTree(CandidateTree):
    """One session's tree along fixed paths; of more than fit the budget, the best by score."""

    def __init__(self, nodes: int, paths: frozenset[RankPath]) -> None:
        super().__init__(nodes)
        self._wanted = paths
        self._inner = inner_paths(paths)
        self._frontier: list[RankPath] = [()]

    def extend(self, tokens: Ints, log_probs: Floats) -> Frontier:
        children = range(log_probs.shape[1])
        wanted = [[(*path, rank) in self._wanted for rank in children] for path in self._frontier]
        row, column = self._remember(tokens, log_probs, np.asarray(wanted, np.bool_))
        level = [
            (*self._frontier[above], rank)
            for above, rank in zip(row.tolist(), column.tolist(), strict=True)
        ]
        hopeful = self._hopeful(len(level)).tolist()
        chosen = [candidate for candidate in hopeful if level[candidate] in self._inner]
        self._frontier = [level[candidate] for candidate in chosen]
        return self._advance(np.asarray(chosen, np.int64), row)


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Trees along `paths`, which hold the beginning of each of them too."""

    paths: frozenset[RankPath]

    def __post_init__(self) -> None:
        if not inner_paths(self.paths) <= self.paths:
            raise ValueError("paths of a static tree: the beginning of one is missing")
        if self.forwarded_at_most(MAX_ROWS - 1) > MAX_ROWS:
            raise ValueError(f"paths of a static tree: more than {MAX_ROWS} have children")

    def within(self, top_k: int, depth: int) -> "StaticPolicy":
        """Only the paths of at most `depth` ranks, all below `top_k`."""
        return StaticPolicy(
            frozenset(path for path in self.paths if len(path) <= depth and max(path) < top_k)
        )

    @property
    def children(self) -> int:
        return 1 + max(rank for path in self.paths for rank in path)

    def forwarded_at_most(self, nodes: int) -> int:
        # A node is only forwarded while it and its ancestors are among the N - 1 best.
        inner = Counter(len(path) for path in inner_paths(self.paths) if len(path) < nodes)
        return sum(min(count, nodes - 1) for count in inner.values())

    def new_tree(self, nodes: int) -> StaticTree:
        return StaticTree(nodes, self.paths)


def inner_paths(paths: Iterable[RankPath]) -> frozenset[RankPath]:
    """Those that lead to a node with children, the root excepted."""
    return frozenset(path[:-1] for path in paths if len(path) > 1)
