"""Patience with drafters, on its own and in simulated time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.tree import DraftTree
from verifier_svc.awaiting import MAX_STRIKES, Asks, Awaited, Patience
from verifier_svc.budget import Budget, Grant

CHAIN = DraftTree((1, 2, 3), (0, 1, 2), (-0.1, -0.2, -0.3))


def budget_where_a_step_takes(seconds: float, accepted: int = 2, adaptive: bool = True) -> Budget:
    """Of each tree of 3 nodes so many are accepted, always."""
    budget = Budget(3, 128, adaptive)
    budget.observe_step(1, seconds)
    for _ in range(2000):
        budget.observe_walk(CHAIN, range(1, accepted + 1))
    return budget


def seconds(patience: Patience, budget: Budget) -> float:
    awaited = patience.awaits(Grant(3, 1), 0.0, budget)
    return awaited.until if awaited is not None else 0.0


def test_a_drafter_that_has_just_joined_is_not_awaited_until_its_first_tree() -> None:
    patience, budget = Patience(), budget_where_a_step_takes(1.0)
    assert patience.awaits(Grant(3, 1), 5.0, budget) is None
    patience.came(in_time=False)
    budget.observe_draft(Grant(3, 1), 0.75)
    awaited = patience.awaits(Grant(3, 1), 5.0, budget)
    assert awaited == Awaited(5.0, 5.75, pytest.approx(7.0), 3)


def test_nobody_is_awaited_before_anything_was_measured() -> None:
    patience = Patience()
    patience.came(in_time=True)
    assert patience.awaits(Grant(3, 1), 5.0, Budget(3, 128)) is None


def test_three_misses_bench_and_every_failed_comeback_takes_twice_as_many_trees() -> None:
    patience = Patience()
    patience.came(in_time=True)
    for _ in range(3):
        assert not patience.benched
        patience.missed()
    needed: list[int] = []
    for _ in range(4):
        trees = 0
        while patience.benched:
            patience.came(in_time=False)
            trees += 1
        needed.append(trees)
        patience.missed()
    assert needed == [2, 4, 8, 16]
    patience.came(in_time=True)
    assert not patience.benched


def test_the_wait_follows_what_trees_of_a_size_bring_and_how_this_sessions_compare() -> None:
    patience = Patience()
    patience.came(in_time=True)
    assert seconds(patience, budget_where_a_step_takes(0.01, accepted=2)) == pytest.approx(0.02)
    assert seconds(patience, budget_where_a_step_takes(0.01, accepted=1)) == pytest.approx(0.01)
    for _ in range(100):
        patience.verified(3, gain=2.0)
    assert seconds(patience, budget_where_a_step_takes(0.01, accepted=2)) == pytest.approx(
        0.03, rel=0.01
    )
    for _ in range(100):
        patience.verified(0, gain=2.0)
    assert seconds(patience, budget_where_a_step_takes(0.01)) == pytest.approx(0.0025)
    fixed = budget_where_a_step_takes(0.01, adaptive=False)
    assert seconds(patience, fixed) == pytest.approx(0.04)


BUDGET = budget_where_a_step_takes(1.0)


@given(st.lists(st.sampled_from(["late", "never"]), max_size=400))
def test_a_drafter_that_is_never_in_time_costs_ever_fewer_waits(history: list[str]) -> None:
    patience, waits = Patience(), 0
    for event in history:
        if seconds(patience, BUDGET):
            waits += 1
            patience.missed()
        if event == "late":
            patience.came(in_time=False)
    assert waits <= 3 + 1 + max(1, len(history)).bit_length() + len(history) // 64


def test_asks_time_only_what_was_asked_of_an_idle_drafter() -> None:
    asks, seven, three = Asks(), Grant(7, 1), Grant(3, 1)
    asks.add(10, at=1.0, grant=seven, caught_up=True)
    assert asks.overdue(1.5) == (seven, 0.5)
    asks.add(11, at=2.0, grant=seven, caught_up=True)
    assert asks.overdue(2.5) is None  # still busy with the one before
    assert asks.answered(10, 3.0) == (seven, 2.0)
    assert asks.answered(11, 3.5) is None
    asks.add(12, at=4.0, grant=three, caught_up=False)
    assert asks.answered(12, 9.0) is None  # features were pulled
    asks.add(13, at=10.0, grant=three, caught_up=True)
    assert asks.answered(13, 10.25) == (three, 0.25)
    assert asks.answered(13, 11.0) is None


def test_a_draft_beside_a_pass_is_not_timed_unless_it_was_overdue() -> None:
    asks, three = Asks(), Grant(3, 1)
    asks.add(10, at=1.0, grant=three, caught_up=True)
    asks.disturb()
    assert asks.overdue(1.5) is None
    assert asks.answered(10, 2.0) is None
    asks.add(11, at=3.0, grant=three, caught_up=True)
    assert asks.overdue(4.0) == (three, 1.0)
    asks.disturb()
    assert asks.answered(11, 5.0) == (three, 2.0), "so slow it is"


def test_a_drafter_is_at_work_until_it_has_answered_or_is_not_believed_any_more() -> None:
    asks = Asks()
    assert not asks.at_work
    for length in range(MAX_STRIKES):
        asks.add(length, 0.0, Grant(1, 1), caught_up=True)
        assert asks.at_work
    asks.answered(MAX_STRIKES - 1, 1.0)
    assert not asks.at_work
    for length in range(10, 11 + MAX_STRIKES):
        asks.add(length, 0.0, Grant(1, 1), caught_up=True)
    assert not asks.at_work
