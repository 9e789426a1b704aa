"""The draft tree: tokens guessed below the last committed token.

Row 0 is the root (the last committed token); node i is row i + 1. `parents[i]` is a *row*, so a
node's parent is a row in [0, i]. One 64-bit word holds a row's ancestry, hence at most 64 rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.errors import MalformedDraft

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in parent-before-child order; `scores` are cumulative log-probabilities."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    @classmethod
    def checked(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        vocab_size: int,
    ) -> "DraftTree":
        """A tree from untrusted parts. Raises MalformedDraft that says what is wrong."""
        nodes = len(tokens)
        if not len(parents) == len(scores) == nodes:
            lengths = f"{nodes}, {len(parents)}, {len(scores)}"
            raise MalformedDraft(f"tokens, parents, scores differ in length: {lengths}")
        if nodes >= MAX_ROWS:
            raise MalformedDraft(f"{nodes} nodes: at most {MAX_ROWS - 1}")
        children: set[tuple[int, int]] = set()
        for node, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True)):
            if not 0 <= token < vocab_size:
                raise MalformedDraft(f"node {node}: token {token} outside of [0, {vocab_size})")
            if not 0 <= parent <= node:
                raise MalformedDraft(
                    f"node {node}: parent row {parent} is not before row {node + 1}"
                )
            above = scores[parent - 1] if parent else 0.0
            if not math.isfinite(score) or score > above:
                raise MalformedDraft(f"node {node}: score {score} not finite or above its parent's")
            if (parent, token) in children:
                raise MalformedDraft(f"node {node}: token {token} twice below row {parent}")
            children.add((parent, token))
        return cls(tuple(tokens), tuple(parents), tuple(scores))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return len(self.tokens) + 1

    def depths(self) -> list[int]:
        """Depth of every row [rows]; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def masks(self) -> list[int]:
        """Ancestry of every row [rows] as a signed 64-bit word: bit j = row j is an ancestor of
        the row or the row itself."""
        masks = [1]
        for row, parent in enumerate(self.parents, start=1):
            masks.append(masks[parent] | 1 << row)
        return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]

    def children(self) -> list[dict[int, int]]:
        """For every row [rows], its children as {token: row}."""
        children: list[dict[int, int]] = [{} for _ in range(self.rows)]
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            children[parent][token] = row
        return children

    def trimmed(self, nodes: int) -> "DraftTree":
        """The `nodes` best nodes by score. Ties go to the earlier node, so that a parent, which
        never scores below its child, is always kept with it."""
        if len(self) <= nodes:
            return self
        best = sorted(range(len(self)), key=lambda node: (-self.scores[node], node))[:nodes]
        return self._restricted(sorted(best), 0)

    def path(self, tokens: Sequence[int]) -> list[int] | None:
        """The rows [len(tokens)] that `tokens` leads through below the root, or None if they leave
        the tree."""
        children = self.children()
        rows = [0]
        for token in tokens:
            if token not in children[rows[-1]]:
                return None
            rows.append(children[rows[-1]][token])
        return rows[1:]

    def rerooted(self, tokens: Sequence[int]) -> "DraftTree | None":
        """The subtree below the node that `tokens` leads to, or None if no path spells them.

        Used when more was committed than the tree knew: scores become relative to the new root.
        """
        path = self.path(tokens)
        if path is None:
            return None
        row = path[-1] if path else 0
        below = {row}
        kept: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent in below:
                below.add(node + 1)
                kept.append(node)
        return self._restricted(kept, row)

    def keeping(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of `nodes` (ascending) alone, each with its parent among them."""
        return self._restricted(nodes, 0)

    def _restricted(self, nodes: Sequence[int], root: int) -> "DraftTree":
        """The tree of `nodes` (ascending, closed under parents up to row `root`)."""
        new_row = {root: 0} | {node + 1: index for index, node in enumerate(nodes, start=1)}
        offset = self.scores[root - 1] if root else 0.0
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(new_row[self.parents[node]] for node in nodes),
            tuple(self.scores[node] - offset for node in nodes),
        )
