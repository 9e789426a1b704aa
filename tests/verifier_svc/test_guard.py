"""The guard's switch."""

from coppice.settings import GuardSettings
from verifier_svc.guard import Guard


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
