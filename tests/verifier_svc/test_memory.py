"""A pool that does not fit is refused before it is taken."""

from pathlib import Path

import psutil
import pytest
import torch

from coppice.errors import StartError
from coppice.settings import VerifierSettings
from verifier_svc.memory import _left_in, fraction_of, free_bytes, pool_slots, slot_bytes


def test_a_slot_takes_what_the_runner_s_tensors_take(new_bench) -> None:
    runner = new_bench((0, 1, 2)).engine.runner
    pool = runner.cache.k.nbytes + runner.cache.v.nbytes + runner.features.nbytes
    each = slot_bytes(runner.model.config, 3 * 32, torch.float32)
    assert each * runner.features.shape[0] == pool


def test_slots_within_the_share_are_taken_and_one_more_is_refused_with_what_would_fit() -> None:
    assert pool_slots(VerifierSettings(kv_slots=900), 1000, 1_000_000, 0.9) == 900
    with pytest.raises(StartError, match=r"kv_slots = 901 .* set it to 900 at most") as error:
        pool_slots(VerifierSettings(kv_slots=901), 1000, 1_000_000, 0.9)
    assert "\n" not in str(error.value)


def test_without_a_number_the_pool_has_as_many_slots_as_its_share_holds() -> None:
    assert pool_slots(VerifierSettings(), 1000, 1_000_999, 0.25) == 250
    with pytest.raises(StartError, match=r"room for 127 tokens, and 128 is the least: of the 0.00"):
        pool_slots(VerifierSettings(), 1000, 127_999, 1.0)


def test_a_pool_has_most_of_a_gpu_and_of_a_cpu_what_all_verifiers_together_may_take() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert fraction_of(VerifierSettings(count=2), gpu) == 0.9
    assert fraction_of(VerifierSettings(count=2), cpu) == 0.125
    assert fraction_of(VerifierSettings(count=2, memory_fraction=0.5), cpu) == 0.25
    assert fraction_of(VerifierSettings(count=2, memory_fraction=0.5), gpu) == 0.5
    # Who says a number knows what else is on the host.
    assert fraction_of(VerifierSettings(count=2, kv_slots=1000), cpu) == 0.9


def test_what_is_free_is_less_than_all() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total


def test_a_container_s_limit_counts_without_the_files_that_it_caches(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert _left_in(tmp_path) == total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 400\nslab 5\n")
    assert _left_in(tmp_path) == total
    (tmp_path / "memory.max").write_text("1000\n")
    assert _left_in(tmp_path) == 1000 - 300
