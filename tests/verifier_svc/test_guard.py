"""The guard's switch."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coppice.settings import GuardSettings
from verifier_svc.guard import Guard

SETTINGS = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(
    lambda pair: GuardSettings(enter=max(pair), exit=min(pair))
)


def switches(seen: list[bool]) -> int:
    return sum(one != other for one, other in zip([False, *seen], seen, strict=False))


def test_it_closes_above_enter_and_reopens_below_exit() -> None:
    guard = Guard(GuardSettings(enter=4, exit=2, dwell_seconds=0.0))
    seen = [guard.update(depth, float(now)) for now, depth in enumerate([4, 5, 4, 2, 1, 4, 5])]
    assert seen == [False, True, True, True, False, False, True]


def test_it_dwells_between_two_switches() -> None:
    guard = Guard(GuardSettings(enter=4, exit=2, dwell_seconds=1.0))
    assert guard.update(9, 0.0)
    assert guard.update(0, 0.9)
    assert not guard.update(0, 1.0)
    assert not guard.update(9, 1.9)
    assert guard.update(9, 2.0)


def test_an_exit_of_zero_still_reopens_when_all_have_left() -> None:
    guard = Guard(GuardSettings(enter=0, exit=0, dwell_seconds=0.0))
    assert [guard.update(depth, float(now)) for now, depth in enumerate((1, 1, 0))] == [
        True,
        True,
        False,
    ]


@given(
    SETTINGS,
    st.lists(st.tuples(st.integers(0, 100), st.floats(0.001, 3.0)), max_size=60),
)
def test_any_load_switches_it_once_per_dwell_at_most(
    settings: GuardSettings, load: list[tuple[int, float]]
) -> None:
    guard, now, closed = Guard(settings), 0.0, False
    times: list[float] = []
    for depth, later in load:
        now += later
        if guard.update(depth, now) != closed:
            closed = not closed
            times.append(now)
    assert all(b - a >= settings.dwell_seconds for a, b in pairwise(times))


@given(SETTINGS.filter(lambda settings: settings.enter != 0), st.lists(st.booleans(), max_size=60))
def test_a_load_that_sways_by_one_about_the_threshold_switches_it_once(
    settings: GuardSettings, ups: list[bool]
) -> None:
    assert settings.enter is not None
    guard = Guard(settings)
    seen = [guard.update(settings.enter + up, 10.0 * now) for now, up in enumerate(ups)]
    assert switches(seen) == any(ups)


@given(SETTINGS, st.integers(61, 1000))
def test_a_burst_closes_it_at_once_and_silence_reopens_it(
    settings: GuardSettings, depth: int
) -> None:
    guard = Guard(settings)
    assert guard.update(depth, 0.0)
    assert not guard.update(0, settings.dwell_seconds)


def test_where_the_threshold_is_not_set_it_stays_open_while_trees_pay() -> None:
    guard = Guard(GuardSettings(), "eagle", lambda depth: 1.4 if depth <= 64 else 1.0)
    assert [guard.update(depth, 10.0 * now) for now, depth in enumerate((48, 49, 64, 65, 60))] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert not guard.update(48, 60.0)  # below three quarters of the depth that closed it


def test_a_threshold_that_is_set_holds_whatever_pays() -> None:
    assert Guard(GuardSettings(enter=8), "eagle", lambda _: 9.0).update(9, 0.0)


def test_nothing_is_closed_before_anything_was_measured() -> None:
    assert not Guard(GuardSettings(), "eagle", lambda _: math.inf).update(100, 0.0)


@given(st.integers(4, 200), st.lists(st.booleans(), max_size=60))
def test_a_load_that_sways_where_trees_cease_to_pay_switches_it_once_at_most(
    limit: int, ups: list[bool]
) -> None:
    guard = Guard(GuardSettings(), "eagle", lambda depth: 1.5 if depth <= limit else 1.0)
    seen = [guard.update(limit + up, 10.0 * now) for now, up in enumerate(ups)]
    assert switches(seen) <= 1
