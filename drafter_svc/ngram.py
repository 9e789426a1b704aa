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
    """Where in a text each n-gram (n = 1 to LONGEST_SUFFIX) was followed by what, and how often
    that foretold the next token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.indexed = 0  # tokens whose predecessors are in the index
        self._followers: dict[tuple[int, ...], list[int]] = {}
        # By the length of the longest suffix that had been seen before:
        self._tried = [0] * (LONGEST_SUFFIX + 1)
        self._foretold = [0] * (LONGEST_SUFFIX + 1)

    def extend(self, tokens: Sequence[int], limit: int) -> None:
        """Takes `tokens`, which begin with the present ones; at most the first `limit` of them
        are indexed."""
        self.tokens.extend(tokens[len(self.tokens) :])
        for position in range(self.indexed, min(len(self.tokens), limit)):
            self._index(position)
            self.indexed = position + 1

    def occurrences(self) -> tuple[int, list[int]]:
        """The length of the longest suffix of the text that was seen before, and the positions that
        followed it."""
        for n in range(min(LONGEST_SUFFIX, len(self.tokens)), 0, -1):
            found = self._followers.get(tuple(self.tokens[-n:]))
            if found:
                return n, found
        return 0, []

    def hit_rate(self, n: int) -> float:
        """How likely the next token is one that followed before, when the longest suffix seen
        before has n tokens (or more, if n is above LONGEST_SUFFIX): as often as it was in this
        text, by Laplace's rule."""
        n = min(n, LONGEST_SUFFIX)
        return (self._foretold[n] + 1) / (self._tried[n] + 2)

    def _index(self, position: int) -> None:
        token, longest = self.tokens[position], True
        for n in range(min(LONGEST_SUFFIX, position), 0, -1):
            key = tuple(self.tokens[position - n : position])
            followers = self._followers.setdefault(key, [])
            if followers and longest:
                longest = False
                self._tried[n] += 1
                self._foretold[n] += any(self.tokens[before] == token for before in followers)
            followers.append(position)
            if len(followers) > OCCURRENCES:
                del followers[0]


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
        """No features, but the first token that has not been looked at, so that a long text is
        indexed in several batches."""
        index = self._indices.get(session_id)
        return max(0, min(len(index.tokens) if index else 0, len(tokens) - 1))

    def forget(self, session_id: str) -> None:
        self._indices.pop(session_id, None)

    def _propose(self, request: DraftRequest) -> DraftTree:
        index = self._indices.get(request.session_id)
        if index is None or list(request.tokens[: len(index.tokens)]) != index.tokens:
            index = self._indices[request.session_id] = SuffixIndex()
        self._indices.move_to_end(request.session_id)
        index.extend(request.tokens, self._capacity)
        while self.indexed > self._capacity:
            self._indices.popitem(last=False)
        if request.budget < 1:
            return DraftTree()
        nodes = min(request.budget, MAX_ROWS - 1)
        n, starts = index.occurrences()
        # A path that is followed lengthens the suffix.
        rates = [index.hit_rate(n + level) for level in range(min(self._depth, nodes))]
        return _merged(index.tokens, starts, rates, nodes)


def _merged(
    tokens: Sequence[int], starts: Sequence[int], rates: Sequence[float], nodes: int
) -> DraftTree:
    """The continuations from each of `starts`, one path each where they differ. `rates` are the
    hit rates of as many levels as the tree is to have.

    Of a node that c continuations pass, a child that d of them take scores log(d / c * hit rate):
    the relative frequency, and the rest for whatever has not been seen (the escape of Cleary and
    Witten 1984, at the frequency that it has in this text).
    """
    children: dict[tuple[int, int], int] = {}
    passing: list[int] = []
    hit: list[float] = []
    for start in starts:
        node = ROOT
        for token, rate in zip(tokens[start : start + len(rates)], rates, strict=False):
            child = children.setdefault((node, token), len(passing))
            if child == len(passing):
                passing.append(0)
                hit.append(rate)
            passing[child] += 1
            node = child
    scores: list[float] = []
    for (parent, _), child in children.items():
        through = len(starts) if parent == ROOT else passing[parent]
        above = 0.0 if parent == ROOT else scores[parent]
        scores.append(above + math.log(passing[child] / through * hit[child]))
    drafted = [token for _, token in children]
    return best_tree(drafted, [parent for parent, _ in children], scores, nodes)
