"""The node budget: the choice that pays, from measurements alone."""

import math
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.tree import DraftTree
from verifier_svc.budget import SIZES, Budget, Grant

CHAIN = DraftTree(tuple(range(15)), tuple(range(15)), tuple(-0.1 * i for i in range(1, 16)))


def measured(
    accepted: int, draft: float, row: float = 0.0, step: float = 0.010, most: int = 15
) -> Budget:
    """After many trees: `accepted` nodes of a chain accepted, `draft` seconds for each tree, a pass
    of `step` seconds and `row` more for each row."""
    budget = Budget(most, 64)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(100):
            budget.observe_step(rows, step + row * rows)
    for _ in range(200):
        budget.observe_walk(CHAIN, range(1, accepted + 1))
        for size in SIZES:
            budget.observe_draft(Grant(size, 1), draft)
    return budget


def most_common(budget: Budget, decoding: int) -> int:
    choices = [budget.choose(decoding).nodes for _ in range(100)]
    return max(set(choices), key=choices.count)


def test_cheap_good_drafts_get_what_they_fill() -> None:
    # Four tokens are accepted, so beyond 5 nodes nothing is gained; rows cost something.
    assert most_common(measured(accepted=4, draft=0.001, row=0.0002), 1) == 5


def test_drafts_that_are_never_accepted_are_not_asked_for() -> None:
    assert most_common(measured(accepted=0, draft=0.001), 1) == 0


def test_drafts_that_take_longer_than_they_save_are_not_asked_for() -> None:
    # 2 extra tokens save 20 ms, the draft takes 25.
    assert most_common(measured(accepted=2, draft=0.025), 1) == 0
    assert most_common(measured(accepted=2, draft=0.015), 1) > 0


def test_under_load_rows_become_dear_and_the_trees_small() -> None:
    budget = measured(accepted=4, draft=0.001, row=0.002)
    sizes = [most_common(budget, decoding) for decoding in (1, 4, 16, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert sizes[-1] == 0


def test_plain_decoding_looks_now_and_then_whether_speculation_pays() -> None:
    for decoding in (1, 8):
        budget = measured(accepted=0, draft=0.001)
        granted = [budget.choose(decoding) for _ in range(1000 * decoding)]
        assert 0.05 < sum(grant.nodes > 0 for grant in granted) / len(granted) < 0.34  # no answers
        tried = 0
        for _ in range(1000 * decoding):
            if budget.choose(decoding).nodes:
                budget.observe_walk(CHAIN, ())
                tried += 1
        assert 0.01 < tried / (1000 * decoding) < 0.1


def test_it_comes_back_when_trees_become_good() -> None:
    budget = measured(accepted=0, draft=0.001)
    for _ in range(30):
        budget.observe_walk(CHAIN, range(1, 7))
    assert most_common(budget, 1) > 0


def test_a_fixed_budget_is_only_bounded_by_the_rows_of_a_pass() -> None:
    budget = Budget(15, 64, adaptive=False)
    assert [budget.choose(n).nodes for n in (1, 4, 8, 32, 64)] == [15, 15, 7, 1, 0]


@given(st.integers(1, 63), st.integers(1, 256), st.integers(1, 64), st.booleans())
def test_all_rows_fit_into_the_pass(most: int, rows: int, decoding: int, adaptive: bool) -> None:
    nodes = Budget(most, rows, adaptive).choose(decoding).nodes
    assert 0 <= nodes <= most
    assert nodes == 0 or (nodes + 1) * decoding <= rows


def test_a_few_unlucky_walks_do_not_make_a_larger_tree_worth_less_than_a_smaller_one() -> None:
    budget = measured(accepted=4, draft=0.001)
    before = budget.speed(5, 1)
    larger = Budget(15, 64)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        larger.observe_step(rows, 0.010)
    for _ in range(50):
        larger.observe_walk(CHAIN.trimmed(5), range(1, 5))
    for _ in range(3):
        larger.observe_walk(CHAIN, ())
    assert larger.speed(15, 1) >= larger.speed(5, 1) > 0.8 * before


# ---- properties ------------------------------------------------------------

LINES = st.lists(st.tuples(st.floats(0.001, 0.1), st.floats(0.0, 0.01)), min_size=1, max_size=3)
# Ranks that are accepted, in every walk.
ACCEPTED = st.lists(st.integers(1, 15), unique=True, max_size=6)


def learned(lines: list[tuple[float, float]], accepted: list[int], draft: float = 0.0) -> Budget:
    """Of a pass that takes max(a + b * rows) over `lines` (a, b): convex, and its share that does
    not depend on rows only falls with them. A draft takes `draft` at any load."""
    budget = Budget(15, 1024)
    rows = 1
    while rows <= 1024:
        budget.observe_step(rows, max(a + b * rows for a, b in lines))
        rows *= 2
    for _ in range(300):
        budget.observe_walk(CHAIN, accepted)
    for size in SIZES if draft else ():
        budget.observe_draft(Grant(size, 1), draft)
    return budget


@settings(deadline=None, max_examples=20)
@given(LINES, ACCEPTED)
def test_more_sessions_never_get_larger_trees(
    lines: list[tuple[float, float]], accepted: list[int]
) -> None:
    budget = learned(lines, accepted)
    for decoding in range(1, 65):
        fewer = deepcopy(budget).choose(decoding).nodes
        more = deepcopy(budget).choose(decoding + 1).nodes
        tied = budget.speed(more, decoding) > (1 - 1e-9) * budget.speed(fewer, decoding)
        assert more <= fewer or tied


@settings(deadline=None, max_examples=20)
@given(LINES, ACCEPTED, st.floats(0.0, 0.05), st.integers(1, 12))
def test_what_is_granted_costs_no_more_than_the_share_for_exploring(
    lines: list[tuple[float, float]], accepted: list[int], draft: float, decoding: int
) -> None:
    budget = learned(lines, accepted, draft)
    plain, lost, passes = budget.speed(0, decoding), 0.0, 300
    for _ in range(passes):
        nodes = {budget.choose(decoding).nodes for _ in range(decoding)}
        assert len(nodes) == 1  # one size for all of a pass
        (size,) = nodes
        lost += 1 - min(1.0, budget.speed(size, decoding) / plain)
        for _ in range(decoding if size else 0):
            tree = CHAIN.trimmed(size)
            budget.observe_walk(tree, [row for row in accepted if row <= len(tree)])
    assert lost <= 0.005 * passes + 1e-9


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 16))
def test_from_nothing_it_comes_back_when_trees_become_good(decoding: int) -> None:
    budget = learned([(0.010, 0.00001)], [], draft=0.001)
    drafted = 0
    for _ in range(4000):
        nodes = [budget.choose(decoding).nodes for _ in range(decoding)]
        drafted = drafted + 1 if all(nodes) else 0
        for size in nodes:
            if size:
                budget.observe_walk(CHAIN.trimmed(size), range(1, min(size, 6) + 1))
        if drafted > 30:
            return
    raise AssertionError("plain decoding for good")


def test_the_rows_of_all_sessions_are_paid_for_so_trees_shrink_bit_by_bit() -> None:
    # By hand: (1 + gain) / step, a pass of rows r taking 10 ms + 0.5 ms * r, nodes 1 to 3 accepted.
    budget = learned([(0.010, 0.0005)], [1, 2, 3])
    for decoding in (1, 2, 5, 8, 13, 20, 32):

        def seconds(nodes: int, decoding: int = decoding) -> float:
            return (0.010 + 0.0005 * decoding * (nodes + 1)) / (1 + min(nodes, 3))

        best = min((0, *(size for size in SIZES if size <= 15)), key=seconds)
        assert deepcopy(budget).choose(decoding).nodes == best


def test_a_size_that_was_not_tried_takes_the_levels_that_its_drafter_reports() -> None:
    budget = Budget(15, 64)
    budget.observe_levels([0.001, 0.002, 0.003])
    assert [budget.draft_seconds(nodes, 1) for nodes in (1, 2, 15)] == pytest.approx(
        [0.001, 0.003, 0.006]
    )
    budget.observe_draft(Grant(2, 1), 0.010)
    assert [budget.draft_seconds(nodes, 1) for nodes in (1, 2, 15)] == pytest.approx(
        [0.001, 0.010, 0.010]
    )
    budget.observe_levels([math.nan])
    assert budget.draft_seconds(1, 1) == 0.001


def test_a_draft_for_many_sessions_is_told_apart_from_one_for_a_single_one() -> None:
    budget = Budget(3, 64)
    for _ in range(20):
        budget.observe_draft(Grant(3, 1), 0.001)
        budget.observe_draft(Grant(3, 16), 0.016)
    assert budget.draft_seconds(3, 1) < 0.3 * budget.draft_seconds(3, 16)


def test_the_advantage_is_unknown_until_trees_were_verified_and_then_a_ratio() -> None:
    budget = Budget(15, 64)
    assert budget.advantage(4) == math.inf
    assert Budget(15, 64, adaptive=False).advantage(4) == 0.0
    assert learned([(0.010, 0.0)], [1, 2]).advantage(4) == pytest.approx(3.0, rel=0.02)
    assert budget.advantage(64) == 0.0  # no room for a tree


def test_while_trees_are_granted_plain_passes_are_measured_now_and_then() -> None:
    budget = measured(accepted=1, draft=0.001)
    grants = [budget.choose(1) for _ in range(4000)]
    plain = [grant for grant in grants if grant.nodes == 0]
    assert 4 < len(plain) < 0.01 * len(grants)
    assert all(grant.once for grant in plain), "the drafter stays in play"


def test_plain_passes_that_were_thought_to_be_slow_do_not_keep_trees_for_good() -> None:
    budget = measured(accepted=1, draft=0.003, row=0.010, step=0.0)
    for _ in range(10):
        budget.observe_step(1, 0.060)  # something else was at work
    assert most_common(budget, 1) > 0
    for _ in range(3000):
        rows = budget.choose(1).nodes + 1
        budget.observe_step(rows, 0.010 * rows)
        if rows > 1:
            budget.observe_walk(CHAIN.trimmed(rows - 1), [1])
    assert most_common(budget, 1) == 0


def test_beside_prompts_trees_pay_as_much_as_otherwise_where_rows_cost_nothing() -> None:
    budget = learned([(0.010, 0.0)], [1, 2, 3], draft=0.001)
    assert deepcopy(budget).choose(4, reading=200).nodes == deepcopy(budget).choose(4).nodes >= 3


@pytest.mark.parametrize(("row", "nodes"), [(0.001, 0), (0.0005, 1)])
def test_beside_prompts_trees_must_win_more_than_their_time_would_otherwise(
    row: float, nodes: int
) -> None:
    # By hand: a pass takes 10 ms, or `row` for each of its rows, a draft 2 ms. Without prompts four
    # sessions commit 8 tokens in 12 ms. Beside 28 rows of a prompt their 4 nodes bring 4 tokens for
    # 4 rows and a draft: 6 ms, in which there are 4 otherwise, or 4 ms, in which there are 2.7.
    budget = learned([(0.010, 0.0), (0.0, row)], [1], draft=0.002)
    assert deepcopy(budget).choose(4).nodes > 0
    grants = [budget.choose(4, reading=28) for _ in range(8)]
    assert grants == [Grant(nodes, 4, once=not nodes)] * 8, "no drafter is told to pause"


@settings(deadline=None, max_examples=20)
@given(LINES, ACCEPTED, st.floats(0.0, 0.05), st.integers(1, 12), st.integers(1, 256))
def test_trees_beside_prompts_never_make_the_whole_take_longer(
    lines: list[tuple[float, float]],
    accepted: list[int],
    draft: float,
    decoding: int,
    reading: int,
) -> None:
    """The tokens that plain decoding lacks then, when the prompt is read, take more than trees."""
    budget = learned(lines, accepted, draft)
    fastest = max(budget.speed(nodes, decoding) for nodes in (0, *SIZES[:7]))
    nodes = budget.choose(decoding, reading).nodes
    rows = decoding + reading
    extra = decoding * sum(rank <= nodes for rank in accepted)
    with_trees = budget.step_seconds(rows + decoding * nodes)
    with_trees += budget.draft_seconds(nodes, decoding) if nodes else 0.0
    assert with_trees <= budget.step_seconds(rows) + extra / fastest + 1e-9
