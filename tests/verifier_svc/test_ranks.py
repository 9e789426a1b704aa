"""Ranks that make up one target, and ranks that are gone."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from benchmarks.inprocess import generate
from benchmarks.random_target import write_target
from benchmarks.rank_processes import rank_group
from coppice.models.hub import DEFAULT_MODEL, resolve_model
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.ranks import WAIT_SECONDS
from verifier_svc.runner import Rows, Runner
from verifier_svc.target import Target

CPU = torch.device("cpu")
VOCAB, SLOTS, LAYERS = 61, 256, (2, 1, 4)
SHAPE = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
    "max_position_embeddings": 256, "attention_bias": True, "mlp_bias": True, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(write_target(tmp_path, SHAPE), CPU, torch.float32, False, None)


def settings_of(slots: int) -> Settings:
    return Settings.model_validate({"verifier": {"kv_slots": slots}})


def chain(tokens: Sequence[int], start: int, logits: int) -> Rows:
    """Tokens at the positions and slots from `start` on, after those of lower slots."""
    slots = list(range(start, start + len(tokens)))
    return Rows(tokens, slots, slots, list(range(start)), None, logits)


def features_at(runner: Runner, slots: range) -> Tensor:
    return runner.features[slots.start : slots.stop].clone()


def test_the_sum_over_ranks_is_that_of_one_rank_up_to_rounding(target: Target) -> None:
    tokens = [(5 * i + 2) % VOCAB for i in range(30)]
    alone = Runner(target.load(), SLOTS, LAYERS)
    (wanted,) = alone.run([chain(tokens, 0, 30)])
    with rank_group(target, 2, SLOTS, LAYERS) as group:
        (logits,) = group.runner.run([chain(tokens, 0, 30)])
        features = features_at(group.runner, range(30))
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features, features_at(alone, range(30)), atol=1e-4, rtol=1e-4)
    assert not torch.equal(logits, wanted)  # else it was not summed in parts


def test_query_heads_of_one_kv_head_may_be_at_several_ranks(tmp_path: Path) -> None:
    shape = SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 1}
    target = Target(write_target(tmp_path, shape), CPU, torch.float32, False, None)
    rows = chain([(5 * i + 2) % VOCAB for i in range(30)], 0, 30)
    (wanted,) = Runner(target.load(), SLOTS).run([rows])
    with rank_group(target, 3, SLOTS) as group:
        (logits,) = group.runner.run([rows])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_rank_that_dies_is_noticed_by_an_idle_group(target: Target) -> None:
    with rank_group(target, 2, SLOTS) as group:
        group.runner.run([chain([4, 5], 0, 1)])
        group.followers[0].kill()
        group.followers[0].join()
        engine = Engine(group.runner, settings_of(SLOTS), VerifierMetrics("test"))
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            engine.run()  # without a session it would wait for ever
        assert time.monotonic() - began < 0.75 * WAIT_SECONDS  # not by the bound, but at once


def test_a_rank_that_dies_is_noticed_by_a_running_pass(target: Target) -> None:
    with rank_group(target, 3, SLOTS) as group:
        group.runner.run([chain([4, 5], 0, 1)])
        group.followers[1].kill()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                group.runner.run([chain(list(range(40)), 0, 1)])
        assert time.monotonic() - began < 0.75 * WAIT_SECONDS  # not by the bound, but at once


def test_a_rank_that_hangs_is_noticed_within_the_bound(target: Target) -> None:
    with rank_group(target, 2, SLOTS, wait_seconds=5.0) as group:
        group.runner.run([chain([4, 5], 0, 1)])
        process = psutil.Process(group.followers[0].pid)
        process.suspend()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            group.runner.run([chain([6], 2, 1)])
        assert 4.0 < time.monotonic() - began < 15.0
        process.kill()


def test_the_real_target_over_two_ranks_says_the_same_in_fp32() -> None:
    path = resolve_model(DEFAULT_MODEL, Settings().cache_dir)
    kept = Path(__file__).parents[1] / "exactness" / "reference_tokens.json"
    entries = json.loads(kept.read_text())["entries"][::12][:2]
    sampling, stopping = SamplingParams(temperature=0.0), StoppingParams(max_tokens=32)
    with rank_group(Target(path, CPU, torch.float32, False, None), 2, 1024) as group:
        engine = Engine(group.runner, settings_of(1024), VerifierMetrics("test"))
        answers = generate(engine, [entry["prompt"] for entry in entries], sampling, stopping)
    assert [a.tokens for a in answers] == [entry["answer"][:32] for entry in entries]
