"""Joins a drafter's trees with n-gram candidates, which cost nothing, within the same budget."""

import math
from collections.abc import Sequence
from dataclasses import replace

from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.drafter import Drafter, DraftRequest, DraftTimes
from drafter_svc.ngram import NgramDrafter
from drafter_svc.tree_builder import ROOT, best_tree


def merged(one: DraftTree, other: DraftTree, nodes: int) -> DraftTree:
    """The `nodes` best nodes of both trees; a path that both hold is one.

    Such a node scores the higher of its two cumulative log-probabilities: each is what its source
    could see, and the one that sees less (a rare repetition, a name that the head has not learnt)
    says less. A child stays at most as likely as its parent, since it is so in either tree; so the
    best nodes are connected.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    found: dict[tuple[int, int], int] = {}  # parent and token -> node
    for tree in (one, other):
        here = [ROOT]  # for every row of the tree
        for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
            above = here[parent]
            node = found.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                scores.append(score)
            scores[node] = max(scores[node], score)
            here.append(node)
    return best_tree(tokens, parents, scores, nodes)


class MergedDrafter:
    """A `Drafter` that adds n-gram candidates to another's trees."""

    def __init__(self, main: Drafter, ngram: NgramDrafter) -> None:
        self._main = main
        self._ngram = ngram
        self.identity = f"{main.identity}+{ngram.identity}"
        self.features = main.features
        self.hidden_size = main.hidden_size
        self.vocab_size = main.vocab_size

    @property
    def times(self) -> DraftTimes:
        return self._main.times

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        return self._main.features_needed(session_id, tokens)

    def forget(self, session_id: str) -> None:
        self._main.forget(session_id)
        self._ngram.forget(session_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Where the text alone is sure of a whole tree, the other drafter only reads on."""
        found = self._ngram.propose(requests)
        asked = [
            replace(request, budget=0) if _sure(tree, request.budget) else request
            for request, tree in zip(requests, found, strict=True)
        ]
        return [
            merged(tree, more, min(request.budget, MAX_ROWS - 1))
            for request, tree, more in zip(requests, self._main.propose(asked), found, strict=True)
        ]


def _sure(tree: DraftTree, budget: int) -> bool:
    """Whether no node could be likelier than any of a full tree's: one that is above one half
    leaves less than that for all others beside it."""
    full = 0 < min(budget, MAX_ROWS - 1) <= len(tree)
    return full and min(tree.scores) > math.log(0.5)
