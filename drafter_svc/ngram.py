"""Drafts by looking up what followed the same words before in the session's own text.

Prompt lookup (Saxena 2023) over several earlier occurrences at once, merged into a tree. Needs
neither a head nor features, and fits any target.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.drafter import DraftRequest, DraftTimes, Features
from drafter_svc.tree_builder import ROOT, best_tree

LONGEST_SUFFIX = 4
OCCURRENCES = 16  # remembered of each n-gram, the latest ones


class SuffixIndex:
    """Where in a text each n-gram (n = 1 to LONGEST_SUFFIX) was followed by what."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.indexed = 0  # tokens whose predecessors are in the index
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int], limit: int) -> None:
        """Takes `tokens`, which begin with the present ones; at most the first `limit` of them
        are indexed."""
        self.tokens.extend(tokens[len(self.tokens) :])
        for position in range(self.indexed, min(len(self.tokens), limit)):
            for n in range(1, min(LONGEST_SUFFIX, position) + 1):
                key = tuple(self.tokens[position - n : position])
                followers = self._followers.setdefault(key, [])
                followers.append(position)
                if len(followers) > OCCURRENCES:
                    del followers[0]
            self.indexed = position + 1

    def occurrences(self) -> list[int]:
        """The positions that followed the longest suffix of the text that was seen before."""
        for n in range(min(LONGEST_SUFFIX, len(self.tokens)), 0, -1):
            found = self._followers.get(tuple(self.tokens[-n:]))
            if found:
                return found
        return []


class NgramDrafter:
    """A `Drafter` by suffix lookup. `capacity` bounds the tokens indexed over all sessions; the
    least recently used are dropped."""

    features = Features.NONE
    hidden_size = 0
    vocab_size = 0
    identity = f"ngram-{LONGEST_SUFFIX}"
    times = DraftTimes()

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity = capacity
        self._depth = depth
        self._indices: OrderedDict[str, SuffixIndex] = OrderedDict()

    @property
    def indexed(self) -> int:
        """Tokens in the indices of all sessions."""
        return sum(index.indexed for index in self._indices.values())

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1, 0)

    def forget(self, session_id: str) -> None:
        self._indices.pop(session_id, None)

    def _propose(self, request: DraftRequest) -> DraftTree:
        if request.budget < 1 or not request.tokens:
            return DraftTree()
        index = self._indices.get(request.session_id)
        if index is None or list(request.tokens[: len(index.tokens)]) != index.tokens:
            index = self._indices[request.session_id] = SuffixIndex()
        self._indices.move_to_end(request.session_id)
        index.extend(request.tokens, self._capacity)
        while self.indexed > self._capacity:
            self._indices.popitem(last=False)
        nodes = min(request.budget, MAX_ROWS - 1)
        return _merged(index.tokens, index.occurrences(), nodes, min(self._depth, nodes))


def _merged(tokens: Sequence[int], starts: Sequence[int], nodes: int, depth: int) -> DraftTree:
    """The continuations of `depth` tokens from each of `starts`, one path each where they differ.

    Of a node that c continuations pass, a child that d of them take scores log(d / (c + 1)): the
    relative frequency, with one more occurrence for whatever has not been seen (escape method A
    of Cleary and Witten 1984).
    """
    children: dict[tuple[int, int], int] = {}
    passing: list[int] = []
    for start in starts:
        node = ROOT
        for token in tokens[start : start + depth]:
            child = children.setdefault((node, token), len(passing))
            if child == len(passing):
                passing.append(0)
            passing[child] += 1
            node = child
    scores: list[float] = []
    for (parent, _), child in children.items():
        through = len(starts) if parent == ROOT else passing[parent]
        above = 0.0 if parent == ROOT else scores[parent]
        scores.append(above + math.log(passing[child] / (through + 1)))
    drafted = [token for _, token in children]
    return best_tree(drafted, [parent for parent, _ in children], scores, nodes)
