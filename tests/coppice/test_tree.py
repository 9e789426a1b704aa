"""Draft trees: ancestry words, trimming, re-rooting, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.errors import MalformedDraft
from coppice.tree import DraftTree

VOCAB = 1000


@st.composite
def trees(draw: st.DrawFn, most: int = 63) -> DraftTree:
    nodes = draw(st.integers(0, most))
    parents = [draw(st.integers(0, node)) for node in range(nodes)]
    scores: list[float] = []
    for parent in parents:
        step = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
        scores.append((scores[parent - 1] if parent else 0.0) - step)
    return DraftTree.checked(list(range(nodes)), parents, scores, VOCAB)


def path(tree: DraftTree, row: int) -> list[int]:
    """Rows from the root to `row`, by walking upwards."""
    rows = [row]
    while rows[-1]:
        rows.append(tree.parents[rows[-1] - 1])
    return rows[::-1]


@given(trees())
def test_a_mask_holds_exactly_the_rows_on_the_path_from_the_root(tree: DraftTree) -> None:
    for row, mask in enumerate(tree.masks()):
        assert -(2**63) <= mask < 2**63
        assert [j for j in range(64) if mask >> j & 1] == path(tree, row)


@given(trees())
def test_depth_is_the_length_of_the_path(tree: DraftTree) -> None:
    assert tree.depths() == [len(path(tree, row)) - 1 for row in range(tree.rows)]


@given(trees(), st.integers(0, 63))
def test_trimming_keeps_a_connected_tree_of_the_best_nodes(tree: DraftTree, nodes: int) -> None:
    trimmed = tree.trimmed(nodes)
    assert len(trimmed) == min(nodes, len(tree))
    DraftTree.checked(trimmed.tokens, trimmed.parents, trimmed.scores, VOCAB)
    assert sorted(trimmed.scores) == sorted(tree.scores, reverse=True)[: len(trimmed)][::-1]
    # Tokens are unique here, so that a node's path can be compared by its tokens.
    for row in range(1, trimmed.rows):
        old = tree.tokens.index(trimmed.tokens[row - 1]) + 1
        spelled = [trimmed.tokens[r - 1] for r in path(trimmed, row)[1:]]
        assert spelled == [tree.tokens[r - 1] for r in path(tree, old)[1:]]


@given(trees(), st.data())
def test_rerooting_keeps_exactly_the_descendants(tree: DraftTree, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, tree.rows - 1))
    spelled = [tree.tokens[r - 1] for r in path(tree, row)[1:]]
    rerooted = tree.rerooted(spelled)
    assert rerooted is not None
    below = [r for r in range(tree.rows) if row in path(tree, r) and r != row]
    assert list(rerooted.tokens) == [tree.tokens[r - 1] for r in below]
    DraftTree.checked(rerooted.tokens, rerooted.parents, rerooted.scores, VOCAB)


def test_rerooting_off_the_tree_gives_none() -> None:
    tree = DraftTree((5, 6), (0, 1), (-1.0, -2.0))
    assert tree.rerooted([6]) is None
    assert tree.rerooted([5, 6, 7]) is None


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "complaint"),
    [
        ([1], [0], [], "differ in length"),
        ([1, 2], [0, 2], [-1.0, -2.0], "parent row 2 is not before row 2"),
        ([1, 2], [0, -1], [-1.0, -2.0], "parent row -1"),
        ([1, 1], [0, 0], [-1.0, -2.0], "token 1 twice below row 0"),
        ([VOCAB], [0], [-1.0], "token 1000 outside"),
        ([-1], [0], [-1.0], "token -1 outside"),
        ([1], [0], [float("nan")], "not finite"),
        ([1], [0], [-float("inf")], "not finite"),
        ([1], [0], [0.5], "above its parent's"),
        ([1, 2], [0, 1], [-1.0, -0.5], "above its parent's"),
        (list(range(64)), [0] * 64, [-1.0] * 64, "at most 63"),
    ],
)
def test_a_malformed_tree_is_refused_with_its_reason(
    tokens: list[int], parents: list[int], scores: list[float], complaint: str
) -> None:
    with pytest.raises(MalformedDraft, match=complaint):
        DraftTree.checked(tokens, parents, scores, VOCAB)
