"""Checkpoint directories, whole and broken, and the identity of what they hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.errors import StartError
from coppice.models.loading import load_target, target_hash

CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"


def load(directory: Path) -> Any:
    return load_target(directory, torch.float32, CPU)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refused(directory: Path, named: str) -> None:
    with pytest.raises(StartError, match=named) as refusal:
        load(directory)
    assert "\n" not in str(refusal.value)


def test_a_sharded_checkpoint_loads_like_a_single_file(published: Any, prefill: Any) -> None:
    directory, model = published("llama", shard="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    tokens = torch.randint(0, 97, (20,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(prefill(load(directory), tokens, 20), expected, atol=1e-4, rtol=0)


def test_tied_embeddings_are_one_tensor(published: Any) -> None:
    weights = load(published("llama", tie_word_embeddings=True)[0]).weights
    assert weights.lm_head is weights.embedding


def test_the_end_tokens_of_generation_go_before_the_config(published: Any) -> None:
    directory, _ = published("llama")
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(directory).config.eos_token_ids == (5, 6)
    (directory / "generation_config.json").write_text("{}")
    assert load(directory).config.eos_token_ids == (2,)


def test_a_missing_tensor_is_named(published: Any) -> None:
    directory, _ = published("llama")
    rewrite(directory, lambda tensors: tensors.pop(NORM))
    refused(directory, rf"{NORM} \[48\] is missing")


def test_a_tensor_of_another_shape_is_named(published: Any) -> None:
    directory, _ = published("llama")
    rewrite(directory, lambda tensors: tensors.update({NORM: torch.ones(47)}))
    refused(directory, rf"{NORM} is \[47\], expected \[48\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(value: float, published: Any) -> None:
    directory, _ = published("llama")
    rewrite(directory, lambda tensors: tensors[NORM].fill_(value))
    refused(directory, rf"{NORM} holds NaN or infinity")


def test_a_tensor_of_integers_is_named(published: Any) -> None:
    directory, _ = published("llama")
    rewrite(directory, lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int8)}))
    refused(directory, rf"{NORM} is of torch.int8")


def test_a_tensor_without_a_place_is_named(published: Any) -> None:
    directory, _ = published("llama")
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(directory, lambda tensors: tensors.update({bias: torch.ones(48)}))
    refused(directory, f"{bias} has no place in a llama of 3 layers")


def test_an_untied_model_without_a_head_is_refused(published: Any) -> None:
    directory, _ = published("llama")
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    refused(directory, "lm_head.weight.*is missing")


def test_a_missing_shard_is_named(published: Any) -> None:
    directory, _ = published("llama", shard="100KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    refused(directory, f"{shard.name} is missing, though the index names it")


def test_a_truncated_file_is_named(published: Any) -> None:
    path = published("llama")[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(path.parent, "model.safetensors is not a whole safetensors file")


def test_an_index_that_points_elsewhere_is_refused(published: Any) -> None:
    directory, _ = published("llama", shard="100KB")
    content = json.dumps({"weight_map": {NORM: "../elsewhere.safetensors"}})
    (directory / "model.safetensors.index.json").write_text(content)
    refused(directory, "outside of its directory")


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_config_is_named(content: str, published: Any) -> None:
    directory, _ = published("llama")
    (directory / "config.json").write_text(content)
    refused(directory, "config.json")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json is missing: is this a checkpoint directory")


def test_a_directory_without_weights_is_refused(published: Any) -> None:
    directory, _ = published("llama")
    (directory / "model.safetensors").unlink()
    refused(directory, "has no weights")


def test_the_hash_does_not_depend_on_the_shards(published: Any, tmp_path: Path) -> None:
    directory, model = published("llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert target_hash(directory) == target_hash(tmp_path / "sharded")


def test_the_hash_tells_weights_and_configs_apart(published: Any) -> None:
    directory, _ = published("llama")
    first = target_hash(directory)
    rewrite(directory, lambda tensors: tensors[NORM].mul_(1.01))
    second = target_hash(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert len({first, second, target_hash(directory)}) == 3


def test_the_hash_ignores_notes_in_the_config(published: Any) -> None:
    directory, _ = published("llama")
    before = target_hash(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert target_hash(directory) == before
