"""Which static shape of tree (levels, width, nodes) commits most tokens per second: by what trees
of every shape would have got accepted, and by what steps cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.tree_builder import GrowingTree, best_tree, forwarded_at_most

MOST_NODES = MAX_ROWS - 1
NODES = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 31, 47, MOST_NODES)
DEPTH, WIDTH = 8, 8  # that are looked into

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    depth: int  # levels
    top_k: int  # width of a level, and children of a node
    nodes: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, measured."""

    steps: Mapping[int, float]  # of a verification by its rows, the root counted
    drafts: Mapping[int, Sequence[float]]  # by width: of drafts of 1, 2, ... levels

    def step(self, rows: int) -> float:
        """Between two measured numbers of rows, on the line that joins them."""
        known = sorted(self.steps)
        return float(np.interp(rows, known, [self.steps[each] for each in known]))

    def of(self, shape: Shape) -> float:
        """A draft and its verification. A tree that ends early is not thought cheaper: the same
        one costs as much in a lower or narrower shape."""
        return self.drafts[shape.top_k][shape.depth - 1] + self.step(shape.nodes + 1)


@dataclass(frozen=True, slots=True)
class Rated:
    """What a shape gains; None: plain decoding."""

    shape: Shape | None
    acceptance_length: float
    tokens_per_second: float


class WholeTree(GrowingTree):
    """A tree whose every candidate is kept in the end, best first: it holds the trees of all lower
    depths and fewer nodes."""

    def finished(self) -> DraftTree:
        candidates = len(self._tokens)
        return best_tree(
            self._tokens.tolist(), self._parents.tolist(), self._scores.tolist(), candidates
        )


@dataclass(slots=True)
class WholeTrees:
    """A policy whose width can be changed between two drafts."""

    children: int = WIDTH

    def forwarded_at_most(self, nodes: int) -> int:
        return forwarded_at_most(nodes, self.children, DEPTH)

    def new_tree(self, nodes: int) -> WholeTree:
        return WholeTree(nodes, self.children, DEPTH)


def accepted(tree: DraftTree, follows: Sequence[int]) -> Lengths:
    """[DEPTH, len(NODES)]: how many of the tokens that follow the root are in the tree, if it has
    1, 2, ... levels and as many nodes as NODES says. `tree` is a whole one."""
    depths = np.asarray(tree.depths()[1:], dtype=np.int64)
    children, row = tree.children(), 0
    path: list[int] = []  # nodes
    for token in follows[:DEPTH]:
        if token not in children[row]:
            break
        row = children[row][token]
        path.append(row - 1)
    lengths = np.zeros((DEPTH, len(NODES)), dtype=np.int64)
    for level in range(1, DEPTH + 1):
        ranks = np.cumsum(depths <= level) - 1  # of nodes among those of the first levels
        for node in path[:level]:
            lengths[level - 1] += ranks[node] < np.asarray(NODES)
    return lengths


def walked(lengths: Lengths) -> tuple[int, int]:
    """Tokens and verifications of an answer, from lengths [positions]: what a tree below each of
    its tokens would have got accepted."""
    position = steps = 0
    while position < len(lengths):
        position += int(lengths[position]) + 1
        steps += 1
    return len(lengths), steps


def rate(answers: Mapping[int, Sequence[Lengths]], costs: Costs) -> Iterator[Rated]:
    """Plain decoding, then every shape. `answers` are by width: for each answer the lengths
    [positions, DEPTH, len(NODES)] of trees below each of its tokens."""
    yield Rated(None, 1.0, 1.0 / costs.step(1))
    for width, of_width in answers.items():
        for depth in range(1, DEPTH + 1):
            for index, nodes in enumerate(NODES):
                shape = Shape(depth, width, nodes)
                walks = [walked(lengths[:, depth - 1, index]) for lengths in of_width]
                length = sum(tokens for tokens, _ in walks) / sum(steps for _, steps in walks)
                yield Rated(shape, length, length / costs.of(shape))
