"""How many prompt tokens share a pass with sessions that decode."""

import random

import pytest

from verifier_svc.pacing import PrefillPace


def settled(pace: PrefillPace, alone: float, token: float, noise: float = 0.0) -> list[float]:
    """Times of passes over a prompt without end, as multiples of one without it."""
    rng = random.Random(1)
    times: list[float] = []
    for _ in range(200):
        tokens = pace.tokens
        seconds = (alone + tokens * token) * rng.uniform(1 - noise, 1 + noise)
        pace.observe(tokens, seconds, alone)
        times.append(seconds / alone)
    return times[20:]


@pytest.mark.parametrize("token", [0.0001, 0.001, 0.003])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_long_prompt_makes_passes_less_than_twice_as_long(token: float, noise: float) -> None:
    times = settled(PrefillPace(4096), alone=0.02, token=token, noise=noise)
    late = [time for time in times if time > 2.0]
    assert len(late) <= 0.05 * len(times)
    assert sorted(times)[len(times) // 2] == pytest.approx(1.75, abs=0.15)


def test_tokens_that_cost_nothing_come_in_whole_chunks() -> None:
    pace = PrefillPace(256)
    settled(pace, alone=0.02, token=0.0)
    assert pace.tokens == 256


def test_a_prompt_is_read_however_dear_its_tokens_are() -> None:
    pace = PrefillPace(256)
    settled(pace, alone=0.001, token=1.0)
    assert pace.tokens == 4
    tiny = PrefillPace(1)
    settled(tiny, alone=0.001, token=1.0)
    assert tiny.tokens == 1


def test_a_single_slow_pass_at_most_takes_a_third_off() -> None:
    pace = PrefillPace(256)
    settled(pace, alone=0.02, token=0.0005)
    before = pace.tokens
    pace.observe(before, 10.0, 0.02)
    assert pace.tokens >= 0.66 * before


def test_a_short_prompt_does_not_make_the_next_chunk_smaller() -> None:
    pace = PrefillPace(256)
    settled(pace, alone=0.02, token=0.0001)
    before = pace.tokens
    for _ in range(20):
        pace.observe(2, 0.025, 0.02)  # what is fixed about a pass weighs on few tokens
    assert pace.tokens == before


def test_nothing_is_learned_while_nobody_knows_what_decoding_takes() -> None:
    pace = PrefillPace(256)
    pace.observe(16, 1.0, 0.0)
    assert pace.tokens == 16
