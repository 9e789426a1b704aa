"""Cost curves: what was measured, what lies between, and what is far away."""

import pytest

from verifier_svc.costs import CostCurve


def curve(points: dict[int, float], proportional: bool = True) -> CostCurve:
    made = CostCurve(proportional)
    for size, seconds in points.items():
        made.observe(size, seconds)
    return made


def test_between_measurements_lies_a_straight_line() -> None:
    made = curve({1: 1.0, 4: 4.0, 64: 34.0})
    assert [made.seconds(size) for size in (1, 2, 4, 34, 64)] == [1.0, 2.0, 4.0, 19.0, 34.0]


def test_beyond_them_it_is_flat_or_in_proportion() -> None:
    points = {2: 1.0, 8: 4.0}
    assert [curve(points).seconds(size) for size in (1, 16)] == [1.0, 8.0]
    assert [curve(points, proportional=False).seconds(size) for size in (1, 16)] == [1.0, 4.0]
    assert curve({}).seconds(5) == 0.0


def test_close_sizes_are_one_point_at_their_mean() -> None:
    made = curve({32: 1.0})
    for _ in range(200):
        made.observe(40, 3.0)
        made.observe(44, 5.0)
    assert made.seconds(42) == pytest.approx(4.0, rel=0.1)


def test_a_machine_that_is_slower_now_is_expected_to_be_so_at_other_sizes() -> None:
    made = curve({1: 1.0, 8: 2.0})
    for _ in range(100):
        made.observe(1, 16.0)
    assert made.seconds(1) == pytest.approx(16.0, rel=0.01)
    assert made.seconds(8) == pytest.approx(2.0 * 2, rel=0.01)  # the fourth root of sixteen


def test_a_first_measurement_between_others_counts_as_much_as_they_do() -> None:
    made = curve({4: 1.0, 8: 3.0})
    made.observe(6, 4.0)
    assert made.seconds(6) == pytest.approx(3.0)  # of 4, and 2 by the neighbours


def test_a_bent_curve_does_not_look_like_a_slower_machine() -> None:
    made = curve({1: 1.0, 16: 16.0})
    for size in (4, 5, 6, 7, 8):  # all of them take twice as long as the line says
        for _ in range(50):
            made.observe(size, 2.0 * size)
    assert made.seconds(4) == pytest.approx(8.0, rel=0.05)
    assert made.seconds(1) == pytest.approx(1.0, rel=0.2)  # not 2.4, by a fourth root of each
