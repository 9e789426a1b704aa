"""The benchmark of a fit's throughput, on a tiny target."""

from pathlib import Path

import pytest

from benchmarks.training import BATCH_TOKENS, STEPS, measure
from training.kinds import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_drafter_is_measured(target: Path, kind: str) -> None:
    found = measure(target, kind, peak=10.0)
    assert found["fraction_of_peak"] == pytest.approx(
        found["gflop_s"] / 10.0, abs=6e-3
    )  # of rounded numbers
    seconds = BATCH_TOKENS / found["tokens_s"]
    assert found["gflop_per_step"] == pytest.approx(found["gflop_s"] * seconds, rel=0.15)


def test_what_a_step_multiplies_is_what_the_head_has_to(target: Path) -> None:
    hidden, inner, vocabulary = 32, 48, 60
    layer = 2 * hidden * hidden + hidden * (32 + 16 + 16 + 32) + 3 * hidden * inner
    # Forward, and twice as much backward; the LM head has no gradient of its own.
    attention = 2 * 4 * 8 * (64 + 160 - 2)
    unrolled = 3 * (layer + attention) + 2 * hidden * vocabulary
    rows = 8 * (160 - 1)
    products = 2 * rows * (STEPS * unrolled + hidden * vocabulary) / 1e9
    # Beside it there are keys and values of the prompts, and of the steps before.
    assert 1.0 < measure(target, "eagle", peak=10.0)["gflop_per_step"] / products < 1.15
