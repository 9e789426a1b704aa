"""A pool that does not fit is refused before it is taken."""

from pathlib import Path

import psutil
import pytest
import torch

from coppice.errors import StartError
from verifier_svc.memory import _left_in, check_pool, free_bytes, slot_bytes


def test_a_slot_takes_what_the_runner_s_tensors_take(new_bench) -> None:
    runner = new_bench((0, 1, 2)).engine.runner
    pool = runner.cache.k.nbytes + runner.cache.v.nbytes + runner.features.nbytes
    each = slot_bytes(runner.model.config, 3 * 32, torch.float32)
    assert each * runner.features.shape[0] == pool


def test_slots_within_the_share_are_taken_and_one_more_is_refused_with_what_would_fit() -> None:
    check_pool(900, each=1000, free=1_000_000, fraction=0.9)
    with pytest.raises(StartError, match=r"kv_slots = 901 .* set it to 900 at most") as error:
        check_pool(901, each=1000, free=1_000_000, fraction=0.9)
    assert "\n" not in str(error.value)


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
