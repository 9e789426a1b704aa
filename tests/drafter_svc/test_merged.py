"""Merging of two sources' trees."""

import math
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest
from drafter_svc.merged import MergedDrafter, merged
from drafter_svc.ngram import NgramDrafter

VOCAB = 4
Paths = dict[tuple[int, ...], float]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for row in range(1, draw(st.integers(0, 12)) + 1):
        parent = draw(st.integers(0, row - 1))
        used = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = sorted(set(range(VOCAB)) - used)
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
        step = draw(st.sampled_from([0.0, 0.25, 1.0, 2.5]))
        scores.append((scores[parent - 1] if parent else 0.0) - step)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def spelt(tree: DraftTree) -> Paths:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.scores, strict=True))


def union(one: DraftTree, other: DraftTree) -> Paths:
    both = [spelt(one), spelt(other)]
    return {
        path: max(paths[path] for paths in both if path in paths)
        for path in both[0].keys() | both[1].keys()
    }


@given(one=trees(), other=trees(), nodes=st.integers(0, 30))
def test_the_merged_tree_keeps_the_contract_and_the_budget(
    one: DraftTree, other: DraftTree, nodes: int
) -> None:
    tree = merged(one, other, nodes)
    # Parents before children, no duplicate sibling, no score above the parent's.
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, VOCAB) == tree
    every, kept = union(one, other), spelt(tree)
    assert len(kept) == min(nodes, len(every))
    assert kept.items() <= every.items()
    assert sorted(kept.values()) == sorted(every.values())[len(every) - len(kept) :]


@given(one=trees(), other=trees())
def test_with_room_for_all_every_node_of_both_is_there_once(
    one: DraftTree, other: DraftTree
) -> None:
    assert spelt(merged(one, other, 63)) == union(one, other)


@given(tree=trees(), nodes=st.integers(0, 30))
def test_a_tree_alone_is_trimmed(tree: DraftTree, nodes: int) -> None:
    trimmed = spelt(tree.trimmed(nodes))
    assert sorted(spelt(merged(tree, DraftTree(), nodes)).values()) == sorted(trimmed.values())
    assert spelt(merged(tree, tree, 63)) == spelt(tree)


def test_a_path_that_both_propose_is_one_node_with_the_higher_score() -> None:
    one = DraftTree((1, 2), (0, 1), (-1.0, -3.0))
    other = DraftTree((1, 3), (0, 1), (-2.0, -2.5))
    assert merged(one, other, 3) == DraftTree((1, 3, 2), (0, 1, 1), (-1.0, -2.5, -3.0))
    assert merged(one, other, 2) == DraftTree((1, 3), (0, 1), (-1.0, -2.5))


def test_a_drafters_trees_get_what_the_text_has_seen() -> None:
    """Two n-gram drafters of different depth: the deeper one adds the rest of the path."""
    drafter = MergedDrafter(NgramDrafter(100, 1), NgramDrafter(100, 3))
    request = DraftRequest("s", [1, 2, 3, 4, 1, 2], 8)
    half = math.log(0.5)
    [tree] = drafter.propose([request])
    assert tree == DraftTree((3, 4, 1), (0, 1, 2), (half, 2 * half, 3 * half))
    assert drafter.propose([DraftRequest("s", [1, 2, 3, 4, 1, 2], 0)]) == [DraftTree()]
    assert drafter.features_needed("s", [1, 2, 3]) == 2
    drafter.forget("s")
    assert drafter.identity == "ngram-4+ngram-4"


def test_a_sure_text_spares_the_other_drafter_its_work() -> None:
    """A text that has repeated itself is sure of the next tokens, though not of many more."""

    class Asked(NgramDrafter):
        budgets: ClassVar[list[int]] = []

        def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            self.budgets.extend(request.budget for request in requests)
            return super().propose(requests)

    drafter = MergedDrafter(Asked(100, 4), NgramDrafter(100, 4))
    tokens = [1, 2, 3, 4] * 5  # the longest suffix was right 12 times of 12: 13 / 14
    for budget in (1, 2, 4, 5):
        [tree] = drafter.propose([DraftRequest("s", tokens, budget)])
        assert tree.tokens == (1, 2, 3, 4)[:budget]
    [tree] = drafter.propose([DraftRequest("t", [1, 2, 1], 1)])  # nothing was foretold so far
    assert tree.tokens == (2,)
    assert Asked.budgets == [0, 0, 0, 5, 1]
