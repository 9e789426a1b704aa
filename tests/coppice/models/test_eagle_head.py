"""Loading of EAGLE-1/2 heads: what fits is taken, a misfit is refused with both sides named."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import coppice
from coppice.errors import StartError
from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.eagle_head import EagleHead, load_eagle_head, load_embeddings
from kernels.packed import dense

CPU = torch.device("cpu")
TARGET = DecoderConfig(
    "llama", 20, 8, 12, 2, 2, 1, 4, rms_norm_eps=1e-5, rope=RopeConfig(), max_context=64
)
EMBEDDING, LM_HEAD = torch.arange(160.0).view(20, 8) / 160, torch.arange(160.0, 0, -1).view(20, 8)
SHAPES = {
    "fc.weight": (8, 16),
    "fc.bias": (8,),
    "layers.0.self_attn.q_proj.weight": (8, 8),
    "layers.0.self_attn.k_proj.weight": (4, 8),
    "layers.0.self_attn.v_proj.weight": (4, 8),
    "layers.0.self_attn.o_proj.weight": (8, 8),
    "layers.0.mlp.gate_proj.weight": (12, 8),
    "layers.0.mlp.up_proj.weight": (12, 8),
    "layers.0.mlp.down_proj.weight": (8, 12),
    "layers.0.post_attention_layernorm.weight": (8,),
}
CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def weights() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=noise) for name, shape in SHAPES.items()}


def write(
    path: Path,
    tensors: Mapping[str, Tensor] | None = None,
    token_map: object = None,
    **changes: object,
) -> Path:
    save_file(dict(weights() if tensors is None else tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(dict(CONFIG) | changes))
    if token_map is not None:
        (path / "token_map.json").write_text(json.dumps(token_map))
    return path


def load(path: Path, target: DecoderConfig = TARGET) -> EagleHead:
    return load_eagle_head(path, target, EMBEDDING, LM_HEAD, torch.float32, CPU)


def test_a_published_head_is_taken_as_it_is(tmp_path: Path) -> None:
    head = load(write(tmp_path))
    stored = weights()
    assert torch.equal(dense(head.fc), stored["fc.weight"])
    assert head.fc_bias is not None
    assert torch.equal(head.fc_bias, stored["fc.bias"])
    assert torch.equal(dense(head.layer.qkv)[8:12], stored["layers.0.self_attn.k_proj.weight"])
    assert head.layer.input_norm is None
    assert head.token_map is None
    assert torch.equal(dense(head.lm_head), LM_HEAD)


def test_a_config_without_bias_needs_no_fc_bias(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["fc.bias"]
    assert load(write(tmp_path, tensors, bias=False)).fc_bias is None


def test_a_missing_fc_bias_is_refused_unless_the_config_says_so(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["fc.bias"]
    with pytest.raises(StartError, match=r"fc\.bias"):
        load(write(tmp_path, tensors))


def test_biases_of_the_projections_are_taken_where_they_are(tmp_path: Path) -> None:
    biases = {f"layers.0.self_attn.{part}_proj.bias": torch.ones(n) for part, n in
              (("q", 8), ("k", 4), ("v", 4))}  # fmt: skip
    head = load(write(tmp_path, weights() | biases))
    assert head.layer.qkv_bias is not None
    assert torch.equal(head.layer.qkv_bias, torch.ones(16))


def test_a_stored_embedding_is_left_aside_for_the_targets(tmp_path: Path) -> None:
    extra = {"embed_tokens.weight": torch.zeros(20, 8)}
    assert torch.equal(load(write(tmp_path, weights() | extra)).embedding, EMBEDDING)


def test_a_pickled_head_is_the_same_head(tmp_path: Path) -> None:
    expected = load(write(tmp_path))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    head = load(tmp_path)
    assert torch.equal(dense(head.layer.gate_up), dense(expected.layer.gate_up))
    assert torch.equal(dense(head.fc), dense(expected.fc))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartError, match="cannot be read as plain weights"):
        load(tmp_path)


def test_the_token_map_picks_rows_of_the_lm_head_and_maps_back(tmp_path: Path) -> None:
    head = load(write(tmp_path, token_map=[3, 7, 19]))
    assert torch.equal(dense(head.lm_head), LM_HEAD[[3, 7, 19]])
    feature = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = head.best_tokens(feature, 8)
    expected = torch.log_softmax(LM_HEAD[[3, 7, 19]] @ feature[0], -1)
    order = sorted(range(3), key=lambda i: -expected[i])
    assert tokens.tolist() == [[(3, 7, 19)[i] for i in order]]
    assert log_probs[0].tolist() == pytest.approx([float(expected[i]) for i in order])


def broken(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return weights() | {name: tensor}


REFUSALS: list[tuple[Callable[[Path], Path], str]] = [
    (lambda p: write(p, vocab_size=21), "vocab_size is 21, the target's is 20"),
    (lambda p: write(p, hidden_size=16), "hidden_size is 16, the target's is 8"),
    (lambda p: write(p, num_hidden_layers=2), "num_hidden_layers is 2, expected 1"),
    (lambda p: write(p, token_map=[1, 20]), r"token 20 is outside of the target's \[0, 20\)"),
    (lambda p: write(p, token_map=[1, -1]), r"token -1 is outside"),
    (lambda p: write(p, token_map=[1, 1]), "listed twice"),
    (lambda p: write(p, token_map=[]), "expected a JSON list"),
    (lambda p: write(p, token_map=[True]), "expected a JSON list"),
    (lambda p: write(p, token_map={"0": 1}), "expected a JSON list"),
    (lambda p: write(p, broken("fc.weight", torch.full((8, 16), torch.nan))), "NaN or infinity"),
    (lambda p: write(p, broken("fc.weight", torch.ones(8, 24))), r"is \[8, 24\], expected \[8, 16"),
    (lambda p: write(p, broken("midlayer.hidden_norm.weight", torch.ones(8))), "midlayer"),
    (lambda p: write(p, {"fc.weight": torch.ones(8, 16)}, bias=False), "q_proj.weight .* missing"),
]


@pytest.mark.parametrize(("written", "message"), REFUSALS)
def test_a_misfit_is_refused_in_one_line(
    tmp_path: Path, written: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(StartError, match=message) as caught:
        load(written(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartError, match="has no weights"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_loaded_without_the_layers(tmp_path: Path, tied: bool) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING}
    if not tied:
        tensors["lm_head.weight"] = LM_HEAD
    save_file(tensors, tmp_path / "model.safetensors")
    config = replace(TARGET, tied_embeddings=tied)
    embedding, lm_head = load_embeddings(tmp_path, config, torch.float32, CPU)
    assert torch.equal(embedding, EMBEDDING)
    assert torch.equal(lm_head, EMBEDDING if tied else LM_HEAD)


def test_the_shipped_head_covers_8192_tokens_and_says_who_it_is() -> None:
    directory = Path(coppice.__file__).parent / "data" / "eagle2-smollm2-135m-first"
    target = replace(TARGET, vocab_size=49152, hidden_size=576)
    embedding = torch.zeros(49152, 576)
    head = load_eagle_head(directory, target, embedding, embedding, torch.bfloat16, CPU)
    assert head.lm_head.shape == (8192, 576)
    assert head.fc_bias is None
    assert head.identity.startswith("eagle2-smollm2-135m-first@")
