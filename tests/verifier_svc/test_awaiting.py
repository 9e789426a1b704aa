"""Patience with drafters, on its own and in simulated time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.awaiting import Asks, Patience
from verifier_svc.budget import Grant


def test_a_drafter_that_has_just_joined_is_not_awaited_until_its_first_tree() -> None:
    patience = Patience()
    assert patience.seconds(1.0, 0.25) == 0.0
    patience.came(in_time=False)
    assert patience.seconds(1.0, 0.25) == 1.0


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


def test_the_wait_follows_what_trees_bring() -> None:
    patience = Patience()
    patience.came(in_time=True)
    for _ in range(100):
        patience.verified(3)
    assert patience.seconds(0.01, 0.25) == pytest.approx(0.03, rel=0.01)
    for _ in range(100):
        patience.verified(0)
    assert patience.seconds(0.01, 0.25) == pytest.approx(0.0025)


@given(st.lists(st.sampled_from(["late", "never"]), max_size=400))
def test_a_drafter_that_is_never_in_time_costs_ever_fewer_waits(history: list[str]) -> None:
    patience, waits = Patience(), 0
    for event in history:
        if patience.seconds(1.0, 0.25):
            waits += 1
            patience.missed()
        if event == "late":
            patience.came(in_time=False)
    assert waits <= 3 + 1 + max(1, len(history)).bit_length() + len(history) // 64


def test_asks_time_only_what_was_asked_of_an_idle_drafter() -> None:
    asks, seven, three = Asks(), Grant(7, 1), Grant(3, 1)
    asks.add(10, at=1.0, grant=seven, in_play=True)
    assert asks.overdue(1.5) == (seven, 0.5)
    asks.add(11, at=2.0, grant=seven, in_play=True)
    assert asks.overdue(2.5) is None  # still busy with the one before
    assert asks.answered(10, 3.0) == (seven, 2.0)
    assert asks.answered(11, 3.5) is None
    asks.add(12, at=4.0, grant=three, in_play=False)
    assert asks.answered(12, 9.0) is None  # features were pulled
    asks.add(13, at=10.0, grant=three, in_play=True)
    assert asks.answered(13, 10.25) == (three, 0.25)
    assert asks.answered(13, 11.0) is None
