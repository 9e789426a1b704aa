"""How much of the target's known answers a drafter guesses right.

The target's answer is decided by the request alone (matched sampling: the token of a position does
not depend on the tree), so a run of speculation can be replayed from a plain answer: below every
root the drafter's tree is laid beside the tokens that the target went on with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.tree import DraftTree
from drafter_svc.drafter import Drafter, DraftRequest, FeatureRows, Features
from training.dataset import Sample

SESSIONS = 32  # drafted at once
CALIBRATION_BINS = 20


@dataclass(slots=True)
class Acceptance:
    """Counts over all verifications."""

    verifications: int = 0
    tokens: int = 0  # committed, the new token included
    offered_at_depth: list[int] = field(default_factory=list[int])  # trees that reach the depth
    accepted_at_depth: list[int] = field(default_factory=list[int])  # and were right down to it
    # Nodes by their predicted path probability, in CALIBRATION_BINS equal intervals of [0, 1].
    nodes_in_bin: list[int] = field(default_factory=lambda: [0] * CALIBRATION_BINS)
    predicted_in_bin: list[float] = field(default_factory=lambda: [0.0] * CALIBRATION_BINS)
    accepted_in_bin: list[int] = field(default_factory=lambda: [0] * CALIBRATION_BINS)

    @property
    def length(self) -> float:
        """Mean tokens per verification, tau."""
        return self.tokens / max(1, self.verifications)

    def add(self, tree: DraftTree, follows: Sequence[int]) -> int:
        """Lays `tree` beside the tokens that follow its root, at least one; returns how many of
        them are committed."""
        path = [0]  # rows
        children = tree.children()
        for token in follows:
            if token not in children[path[-1]]:
                break
            path.append(children[path[-1]][token])
        self._count_depths(max(tree.depths()[1:], default=0), len(path) - 1, len(follows))
        for row, score in enumerate(tree.scores, start=1):
            probability = math.exp(score)
            interval = min(int(probability * CALIBRATION_BINS), CALIBRATION_BINS - 1)
            self.nodes_in_bin[interval] += 1
            self.predicted_in_bin[interval] += probability
            self.accepted_in_bin[interval] += row in path
        committed = min(len(path), len(follows))
        self.verifications += 1
        self.tokens += committed
        return committed

    def _count_depths(self, offered: int, accepted: int, follows: int) -> None:
        # A tree that reaches beyond the end of the answer is judged as far as the answer goes.
        for level in range(min(offered, follows)):
            if level == len(self.offered_at_depth):
                self.offered_at_depth.append(0)
                self.accepted_at_depth.append(0)
            self.offered_at_depth[level] += 1
            self.accepted_at_depth[level] += level < accepted


def acceptance(drafter: Drafter, samples: Sequence[Sample], nodes: int) -> Acceptance:
    """Replays all samples with trees of `nodes` drafted nodes at most."""
    total = Acceptance()
    for start in range(0, len(samples), SESSIONS):
        part = {str(start + i): s for i, s in enumerate(samples[start : start + SESSIONS])}
        # The first token of an answer comes of the prefill.
        committed = {name: sample.prompt_length + 1 for name, sample in part.items()}
        while part:
            requests = [
                draft_request(drafter, name, part[name], committed[name], nodes) for name in part
            ]
            for request, tree in zip(requests, drafter.propose(requests), strict=True):
                name = request.session_id
                tokens = part[name].tokens.tolist()
                committed[name] += total.add(tree, tokens[committed[name] :])
                if committed[name] >= len(tokens):
                    drafter.forget(name)
                    del part[name]
    return total


def draft_request(
    drafter: Drafter, name: str, sample: Sample, committed: int, nodes: int
) -> DraftRequest:
    """For a tree below the last of a sample's first `committed` tokens."""
    tokens: list[int] = sample.tokens[:committed].tolist()
    if drafter.features is Features.NONE:
        return DraftRequest(name, tokens, nodes)
    needed = drafter.features_needed(name, tokens)
    return DraftRequest(
        name, tokens, nodes, FeatureRows(needed, sample.features[needed : committed - 1])
    )
