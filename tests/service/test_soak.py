"""A short soak of the running whole: random and hostile clients, and a hostile drafter."""

import pytest

from benchmarks.soak import SERVICE, run
from launcher.sources import load_settings

pytestmark = [pytest.mark.service, pytest.mark.long]


def test_a_short_soak_violates_nothing() -> None:
    result = run(load_settings(SERVICE), clients=6, questions=6, minutes=0.15, seed=1)
    assert result.violations == []
    assert result.actions["answer"] > 0
    assert result.actions["attacked"] > 0
    assert result.metrics["malformed_drafts"] > 0
    assert result.bad_trees > 0
