"""Drafts with Medusa heads: one feature of the target gives all levels of the tree at once.

What a head predicts depends on the position alone, not on the path to it, so a node's children are
the same as its siblings'. Nothing is kept of a session.
"""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from coppice.models.medusa import MedusaHeads
from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.drafter import DraftRequest, DraftTimes, Features
from drafter_svc.tree_builder import CandidateTree, TreePolicy


class MedusaDrafter:
    """A `Drafter` with Medusa heads."""

    features = Features.FINAL

    def __init__(self, heads: MedusaHeads, policy: TreePolicy) -> None:
        self._heads = heads
        self._policy = policy
        self._times = DraftTimes()
        self.identity = heads.identity
        self.hidden_size = heads.hidden_size
        self.vocab_size = heads.vocab_size

    @property
    def times(self) -> DraftTimes:
        return self._times

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        # The feature before the root's, which gave the root; the first head goes on from there.
        return max(len(tokens) - 2, 0)

    def forget(self, session_id: str) -> None:
        pass

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees: dict[str, CandidateTree] = {}
        features: list[Tensor] = []
        for request in requests:
            feature = self._last_feature(request)
            if request.budget > 0 and feature is not None:
                nodes = min(request.budget, MAX_ROWS - 1)
                trees[request.session_id] = self._policy.new_tree(nodes)
                features.append(feature)
        levels = self._grow(list(trees.values()), torch.stack(features)) if trees else ()
        self._times = DraftTimes(0.0, levels)
        return [
            trees[r.session_id].finished() if r.session_id in trees else DraftTree()
            for r in requests
        ]

    def _last_feature(self, request: DraftRequest) -> Tensor | None:
        """The target's [hidden] at the position before the root's, if it was given."""
        given, position = request.features, len(request.tokens) - 2
        if given is None or given.rows.shape[1] != self.hidden_size:
            return None
        if not given.start <= position < given.end:
            return None
        return given.rows[position - given.start].to(self._heads.device, self._heads.dtype)

    def _grow(self, trees: list[CandidateTree], features: Tensor) -> tuple[float, ...]:
        """Grows all trees, from features [trees, hidden]; returns the seconds of each level."""
        seconds: list[float] = []
        growing = [(tree, row, 1) for row, tree in enumerate(trees)]
        for head in range(len(self._heads.heads)):
            started = perf_counter()
            rows = features[[row for _, row, _ in growing]]
            best = self._heads.best_tokens(head, rows, self._policy.children)
            tokens, log_probs = (part.cpu().numpy() for part in best)
            frontiers: list[tuple[CandidateTree, int, int]] = []
            for mine, (tree, row, count) in enumerate(growing):
                children = [mine] * count  # each node of the frontier has the same
                frontier = tree.extend(tokens[children], log_probs[children])
                if len(frontier):
                    frontiers.append((tree, row, len(frontier)))
            growing = frontiers
            seconds.append(perf_counter() - started)
            if not growing:
                break
        return tuple(seconds)
