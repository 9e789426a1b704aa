"""What a drafter's scores are worth: from predicted path probabilities to observed acceptance.

Raw probabilities of a head are overconfident in some places and too modest in others, deep nodes
above all, so each is multiplied by the ratio of accepted to predicted among nodes of its depth and
probability, learned online with exponential forgetting. Pure policy.
"""

import math
from collections.abc import Sequence

from coppice.tree import DraftTree

_DEPTHS = 4  # told apart; deeper ones are one
_HALVINGS = 8  # of the probability that are told apart, in steps of half a halving
# So many predicted acceptances weigh as much as what was observed, so that few nodes say little.
_PRIOR = 2.0
# Of a cell's past that is left after each of its nodes.
_MEMORY = 0.999


class Calibration:
    """Of one drafter's trees, or of all that a verifier gets."""

    def __init__(self) -> None:
        cells = _DEPTHS * (2 * _HALVINGS + 1)
        self._nodes = [0.0] * cells
        self._predicted = [0.0] * cells
        self._accepted = [0.0] * cells

    def probabilities(self, tree: DraftTree) -> list[float]:
        """For every node, how likely its whole path is accepted; never above its parent's."""
        depths = tree.depths()
        out = [1.0]  # by row
        for row, (parent, score) in enumerate(zip(tree.parents, tree.scores, strict=True), 1):
            predicted = math.exp(score)
            cell = _cell(depths[row], predicted)
            ratio = (self._accepted[cell] + _PRIOR) / (self._predicted[cell] + _PRIOR)
            out.append(min(predicted * ratio, out[parent]))
        return out[1:]

    def observe(self, tree: DraftTree, follows: Sequence[int]) -> None:
        """Lays a tree beside the tokens that were committed below its root: at least one, of which
        the last need not be the tree's. Nodes whose fate these do not tell are left out."""
        depths = tree.depths()
        fates: list[bool | None] = [True]  # by row: whether its whole path was committed
        for row, (token, parent, score) in enumerate(
            zip(tree.tokens, tree.parents, tree.scores, strict=True), 1
        ):
            depth, fate = depths[row], fates[parent]
            if fate:
                fate = token == follows[depth - 1] if depth <= len(follows) else None
            fates.append(fate)
            if fate is not None:
                self._note(_cell(depth, math.exp(score)), math.exp(score), fate)

    def _note(self, cell: int, predicted: float, accepted: bool) -> None:
        for sums, value in (
            (self._nodes, 1.0),
            (self._predicted, predicted),
            (self._accepted, float(accepted)),
        ):
            sums[cell] = _MEMORY * sums[cell] + value

    @property
    def error(self) -> float:
        """Mean gap between predicted and observed over all nodes (expected calibration error)."""
        gaps = sum(abs(p - a) for p, a in zip(self._predicted, self._accepted, strict=True))
        return gaps / max(1.0, sum(self._nodes))


def _cell(depth: int, probability: float) -> int:
    halvings = -2.0 * math.log2(max(probability, 2.0**-_HALVINGS))
    return (min(depth, _DEPTHS) - 1) * (2 * _HALVINGS + 1) + int(halvings)
