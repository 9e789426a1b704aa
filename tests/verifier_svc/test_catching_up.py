"""Drafters catch up where that pays, by what it was seen to cost and what trees save."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.tree import DraftTree
from verifier_svc.budget import Budget
from verifier_svc.catching_up import CatchingUp, Gap

PASS_SECONDS = 0.01


def measured(positions: int, delay: float, answer: int, quiet: float) -> CatchingUp:
    """Many times the same."""
    catching_up = CatchingUp()
    for _ in range(100):
        catching_up.begins(positions)
        catching_up.delayed(delay / 2)
        catching_up.delayed(delay / 2)
        catching_up.ended(answer)
    for _ in range(400):
        catching_up.committed(1, reading=False)
    for turn in range(2000):
        catching_up.committed(1, reading=turn % 100 >= 100 * quiet)
    return catching_up


def test_where_drafters_have_cores_of_their_own_it_always_pays() -> None:
    free = measured(300, 0.0, answer=2, quiet=1.0)
    assert free.usual_seconds == 0.0
    assert free.pays(Gap(10_000, 1, 1), saved=0.0)


def test_what_it_costs_is_the_delay_of_one_and_grows_with_what_is_lacked() -> None:
    costly = measured(200, 0.02, answer=100, quiet=1.0)
    assert costly.usual_seconds == pytest.approx(0.02)
    # 100 tokens, each of which saves so much.
    assert costly.pays(Gap(200, 0, 1000), saved=0.000_21)
    assert not costly.pays(Gap(200, 0, 1000), saved=0.000_19)
    assert not costly.pays(Gap(250, 0, 1000), saved=0.000_21)
    assert costly.pays(Gap(20, 0, 1000), saved=0.000_021)


@pytest.mark.parametrize(
    ("produced", "left", "remaining"),
    [(0, 1000, 100), (0, 7, 7), (40, 1000, 60), (70, 1000, 70), (500, 1000, 500), (500, 30, 30)],
)
def test_answers_go_on_as_others_did_or_for_as_long_as_they_have(
    produced: int, left: int, remaining: int
) -> None:
    costly = measured(200, 0.02, answer=100, quiet=1.0)
    gap = Gap(200, produced, left)
    assert costly.pays(gap, saved=1.01 * 0.02 / remaining)
    assert not costly.pays(gap, saved=0.99 * 0.02 / remaining)


def test_no_answer_has_ended_yet_so_this_one_may_be_as_long_as_it_may() -> None:
    costly = CatchingUp()
    costly.begins(100)
    costly.delayed(0.01)
    assert costly.pays(Gap(100, 1, 1000), saved=0.000_011)


def test_while_prompts_are_read_tokens_save_what_they_save_then() -> None:
    costly = measured(200, 0.02, answer=100, quiet=0.5)
    assert costly.pays(Gap(200, 0, 1000), saved=0.000_5)
    assert not costly.pays(Gap(200, 0, 1000), saved=0.000_3)
    assert costly.pays(Gap(200, 0, 1000), saved=0.000_3, beside=0.000_15)
    assert not costly.pays(Gap(200, 0, 1000), saved=0.000_3, beside=0.000_05)


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.floats(-0.1, 0.1), st.integers(1, 500), st.booleans())
    )
)
def test_passes_that_were_faster_than_foretold_make_it_cost_no_less_than_nothing(
    events: list[tuple[int, float, int, bool]],
) -> None:
    catching_up = CatchingUp()
    for positions, delay, answer, reading in events:
        catching_up.begins(positions)
        catching_up.delayed(delay)
        catching_up.ended(answer)
        catching_up.committed(3, reading)
    assert catching_up.usual_seconds >= 0.0
    assert not catching_up.pays(Gap(1, 1, 1000), saved=-1.0)


def speculating(delay: float) -> Budget:
    """One session whose trees are accepted whole for one pass's time, and so long a delay for each
    time that a drafter caught up with 100 positions."""
    budget = Budget(3, 64)
    tree = DraftTree((5, 6, 7), (-1, 0, 1), (-0.1, -0.2, -0.3))
    for _ in range(300):
        budget.observe_step(1, PASS_SECONDS)
        budget.observe_step(4, PASS_SECONDS)
        grant = budget.choose(1)
        if grant.nodes:
            budget.observe_draft(grant, PASS_SECONDS / 10)
            budget.observe_walk(tree, (1, 2, 3))
        budget.catching_up.begins(100)
        budget.catching_up.delayed(delay)
    return budget


def test_trees_are_granted_to_those_for_whom_catching_up_pays() -> None:
    budget = speculating(delay=0.05)
    # Four tokens for 1.1 passes: a token saves 7.25 ms, so eight tokens are worth 58 ms.
    assert budget.choose(1, gap=Gap(100, 1, 8)).nodes > 0
    refused = budget.choose(1, gap=Gap(100, 1, 6))
    assert refused.nodes == 0
    assert refused.once, "the drafter is not told to pause"
    assert budget.choose(1).nodes > 0, "a drafter that is in play goes on"


def test_plain_decoding_looks_for_trees_more_rarely_where_that_costs_catching_up() -> None:
    def trials(delay: float) -> int:
        budget = Budget(3, 64)
        tree = DraftTree((5, 6, 7), (-1, 0, 1), (-0.1, -0.2, -0.3))
        tried = 0
        for _ in range(20_000):
            budget.observe_step(1, PASS_SECONDS)
            budget.observe_step(4, 2 * PASS_SECONDS)
            grant = budget.choose(1, gap=Gap(100, 1, 1000))
            if grant.nodes:
                tried += 1
                budget.observe_draft(grant, PASS_SECONDS)
                budget.observe_walk(tree, ())
                budget.catching_up.begins(100)
                budget.catching_up.delayed(delay)
        return tried

    free, dear = trials(0.0), trials(20 * PASS_SECONDS)
    assert 0 < dear < free / 2
