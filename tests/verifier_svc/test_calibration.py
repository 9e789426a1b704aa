"""What scores are worth, and which nodes are verified for it."""

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.tree import DraftTree
from verifier_svc.budget import Budget
from verifier_svc.calibration import Calibration


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree: parents before children, no child above its parent's score."""
    count = draw(st.integers(1, 15))
    parents, scores = [], []
    for node in range(count):
        parents.append(draw(st.integers(0, node)))
        above = scores[parents[-1] - 1] if parents[-1] else 0.0
        scores.append(above - draw(st.floats(0.0, 4.0)))
    return DraftTree(tuple(range(count)), tuple(parents), tuple(scores))


def paths(tree: DraftTree) -> list[list[int]]:
    """The tokens from the root down to each node."""
    out: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        out.append([*(out[parent - 1] if parent else []), token])
    return out


@settings(deadline=None, max_examples=50)
@given(trees(), st.lists(st.tuples(trees(), st.lists(st.integers(0, 15), min_size=1))))
def test_it_stays_a_probability_of_paths(
    tree: DraftTree, history: list[tuple[DraftTree, list[int]]]
) -> None:
    calibration = Calibration()
    for drafted, follows in history:
        calibration.observe(drafted, follows)
    chances = calibration.probabilities(tree)
    assert len(chances) == len(tree)
    for chance, parent in zip(chances, tree.parents, strict=True):
        assert 0.0 <= chance <= (chances[parent - 1] if parent else 1.0)


def test_it_learns_what_is_observed() -> None:
    random, calibration = Random(0), Calibration()
    tree = DraftTree((7, 8), (0, 1), (math.log(0.6), math.log(0.2)))
    # Really accepted: the first in 30 of 100, and then the second as often as not.
    for _ in range(3000):
        follows = [7, random.choice((8, 9)), 1] if random.random() < 0.3 else [5]
        calibration.observe(tree, follows)
    first, second = calibration.probabilities(tree)
    assert abs(first - 0.30) < 0.05
    assert abs(second - 0.15) < 0.05
    # The mean of |0.6 - 0.3| and |0.2 - 0.15|, as what is seen sways.
    assert abs(calibration.error - 0.175) < 0.04


@settings(deadline=None, max_examples=100)
@given(trees(), st.data())
def test_only_nodes_whose_fate_is_known_count(tree: DraftTree, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(tree)))
    follows = [*path[: data.draw(st.integers(0, len(path)))], data.draw(st.integers(0, 20))]
    known = accepted = 0
    for way in paths(tree):
        right = way == follows[: len(way)]
        wrong = any(a != b for a, b in zip(way, follows, strict=False))
        known += right or wrong
        accepted += right
    calibration = Calibration()
    calibration.observe(tree, follows)
    assert math.isclose(sum(calibration._nodes), known, rel_tol=0.05)
    assert math.isclose(sum(calibration._accepted), accepted, rel_tol=0.05)


def budget_of(seconds_of_a_row: float, adaptive: bool = True) -> Budget:
    budget = Budget(15, 64, adaptive)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(50):
            budget.observe_step(rows, 0.010 + seconds_of_a_row * rows)
    return budget


# Two likely tokens, and thirteen of one in twenty beside them.
WIDE = DraftTree(
    tuple(range(15)), (0, 1, *(0 for _ in range(13))), (-0.1, -0.2, *(math.log(0.05),) * 13)
)


def granted(budget: Budget) -> Budget:
    """After trees whose first two nodes were accepted, and the grant that follows."""
    for _ in range(200):
        budget.observe_walk(WIDE, (1, 2))
        budget.calibration.observe(WIDE, (0, 1, 99))
    assert budget.choose(1).nodes > 0
    return budget


def test_a_node_is_verified_where_it_pays_for_its_row() -> None:
    # Nearly free rows: all of it. A row of 1 ms: 3 tokens in 12 ms or so, so a node must be
    # accepted in a quarter of the cases.
    assert granted(budget_of(1e-7)).worthwhile(WIDE) == WIDE
    left = granted(budget_of(0.001)).worthwhile(WIDE)
    assert left.tokens == (0, 1)
    assert left.parents == (0, 1)


def test_a_fixed_budget_verifies_all() -> None:
    assert granted(budget_of(0.001, adaptive=False)).worthwhile(WIDE) == WIDE


@settings(deadline=None, max_examples=50)
@given(trees())
def test_what_is_left_is_a_tree_of_the_same_paths(tree: DraftTree) -> None:
    left = granted(budget_of(0.001)).worthwhile(tree)
    assert DraftTree.checked(left.tokens, left.parents, left.scores, 16) == left
    assert all(path in paths(tree) for path in paths(left))
