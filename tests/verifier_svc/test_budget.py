"""The node budget: the choice that pays, from measurements alone."""

from hypothesis import given
from hypothesis import strategies as st

from coppice.tree import DraftTree
from verifier_svc.budget import SIZES, Budget

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
            budget.observe_draft(size, draft)
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
    budget = measured(accepted=0, draft=0.001)
    trials = [grant for grant in (budget.choose(1) for _ in range(480)) if grant.trial]
    assert 5 <= len(trials) <= 15
    assert all(grant.nodes > 0 for grant in trials)
    many = [grant for grant in (budget.choose(8) for _ in range(480)) if grant.trial]
    assert len(many) <= 2


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
