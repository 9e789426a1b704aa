"""Loading of heads: what fits is taken, a misfit is refused with both sides named."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coppice.errors import StartError
from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.heads.head import DraftHead, Eagle3Head, EagleHead
from coppice.models.heads.loading import feature_layers, load_head, shipped_head
from coppice.models.loading import load_embeddings
from kernels.packed import dense

CPU = torch.device("cpu")
TARGET = DecoderConfig(
    "llama", 20, 8, 12, 6, 2, 1, 4, rms_norm_eps=1e-5, rope=RopeConfig(), max_context=64
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


def load(path: Path, target: DecoderConfig = TARGET) -> DraftHead:
    return load_head(path, target, EMBEDDING, LM_HEAD, torch.float32, CPU)


def test_a_published_head_is_taken_as_it_is(tmp_path: Path) -> None:
    head = load(write(tmp_path))
    stored = weights()
    assert isinstance(head, EagleHead)
    assert torch.equal(dense(head.fc), stored["fc.weight"])
    assert head.fc_bias is not None
    assert torch.equal(head.fc_bias, stored["fc.bias"])
    assert torch.equal(dense(head.layer.qkv)[8:12], stored["layers.0.self_attn.k_proj.weight"])
    assert head.layer.input_norm is None
    assert head.token_map is None
    assert torch.equal(dense(head.lm_head), LM_HEAD)


def test_a_missing_fc_bias_is_refused_unless_the_config_says_so(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["fc.bias"]
    with pytest.raises(StartError, match=r"fc\.bias"):
        load(write(tmp_path, tensors))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartError, match="cannot be read as plain weights"):
        load(tmp_path)


def write_pt(path: Path, content: object) -> Path:
    if not (path / "config.json").exists():
        write(path)
    torch.save(content, path / "freq_1.pt")
    return path


def write3(path: Path, changes: Mapping[str, Tensor | None], **config: object) -> Path:
    """An EAGLE-3 head that drafts tokens 3, 7 and 19; None leaves a tensor out."""
    tensors: dict[str, Tensor | None] = {
        name.replace("layers.0", "midlayer"): tensor for name, tensor in weights().items()
    }
    for part, size in (("q", 8), ("k", 4), ("v", 4)):
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = torch.ones(size, 16)
    tensors |= {f"midlayer.{n}.weight": torch.ones(8) for n in ("hidden_norm", "input_layernorm")}
    tensors |= {"fc.bias": None, "fc.weight": torch.ones(8, 24), "norm.weight": torch.ones(8)}
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[3, 7, 19]] = True
    tensors |= {"lm_head.weight": torch.ones(3, 8), "d2t": torch.tensor([3, 6, 17]), "t2d": mask}
    kept = {
        name: tensor for name, tensor in (tensors | dict(changes)).items() if tensor is not None
    }
    return write(path, kept, **({"draft_vocab_size": 3} | config))


def test_an_eagle3_head_with_its_maps_is_taken(tmp_path: Path) -> None:
    head = load(write3(tmp_path, {}))
    assert isinstance(head, Eagle3Head)
    assert head.token_map is not None
    assert head.token_map.tolist() == [3, 7, 19]


def test_a_target_without_the_usual_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"layers \[2, 1, -1\], the target has 2 layers"):
        feature_layers(write3(tmp_path, {}), replace(TARGET, layers=2))


def broken(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return weights() | {name: tensor}


REFUSALS: list[tuple[Callable[[Path], Path], str]] = [
    (lambda p: write(p, vocab_size=21), "vocab_size is 21, the target's is 20"),
    (lambda p: write(p, hidden_size=16), "hidden_size is 16, the target's is 8"),
    (lambda p: write(p, target_hidden_size=9), "target_hidden_size is 9, the target's is 8"),
    (lambda p: write(p, num_hidden_layers=2), "num_hidden_layers is 2, expected 1"),
    (lambda p: write(p, token_map=[1, 20]), r"token 20 is outside of the target's \[0, 20\)"),
    (lambda p: write(p, token_map=[1, -1]), r"token -1 is outside"),
    (lambda p: write(p, token_map=[1, 1]), "listed twice"),
    (lambda p: write(p, token_map=[]), "expected a list of token ids"),
    (lambda p: write(p, token_map=[True]), "expected a list of token ids"),
    (lambda p: write(p, token_map={"0": 1}), "expected a list of token ids"),
    (lambda p: write(p, token_map=[3], draft_vocab_size=2), "draft_vocab_size is 2, .* to 1 of"),
    (lambda p: write(p, draft_vocab_size=7), "draft_vocab_size is 7, .* to 20 of"),
    (lambda p: write_pt(p, torch.tensor([1.0])), r"freq_1\.pt: expected a list of token ids"),
    (lambda p: write_pt(p, torch.tensor([[1]])), r"freq_1\.pt: expected a list of token ids"),
    (lambda p: write_pt(p, [25]), r"freq_1\.pt: token 25 is outside of the target's"),
    (lambda p: write_pt(p, Path("x")), r"freq_1\.pt cannot be read as plain weights"),
    (lambda p: write_pt(write(p, token_map=[1]), [2]), "several token maps: freq_1.pt, token_map"),
    (lambda p: write(p, broken("fc.weight", torch.full((8, 16), torch.nan))), "NaN or infinity"),
    (lambda p: write(p, broken("fc.weight", torch.ones(8, 24))), r"is \[8, 24\], expected \[8, 16"),
    (lambda p: write(p, broken("fc.weight", torch.ones(8, 16).long())), "int64, expected floats"),
    (lambda p: write(p, broken("norm.weight", torch.ones(8))), "norm.weight has no place in an EA"),
    (
        lambda p: write(p, broken("layers.1.mlp.up_proj.weight", torch.ones(8))),
        "layers.1.*no place",
    ),
    (lambda p: write(p, broken("midlayer.mlp.up_proj.weight", torch.ones(8))), "one and the same"),
    (lambda p: write(p, broken("lm_head.weight", torch.ones(7, 8))), "has 7 rows, the draft voc"),
    (lambda p: write(p, {"fc.weight": torch.ones(8, 16)}, bias=False), "q_proj.weight .* missing"),
    (lambda p: write(p, speculators_model_type="mtp"), "'mtp' is none of eagle, eagle3"),
    (lambda p: write(p, layernorms=True), "layernorms = True is not supported"),
    (lambda p: write3(p, {"d2t": None}), "tensor d2t is missing"),
    (lambda p: write3(p, {"d2t": None, "t2d": None}), "draft_vocab_size is 3, .* to 20 of the"),
    (lambda p: write3(p, {"d2t": torch.tensor([0, 0, 18])}), "d2t: token 20 is outside of the ta"),
    (lambda p: write3(p, {"d2t": torch.tensor([-1, 0, 0])}), "d2t: token -1 is outside"),
    (lambda p: write3(p, {"d2t": torch.tensor([1, 0, 0])}), "d2t: a token is listed twice"),
    (
        lambda p: write3(p, {"d2t": torch.ones(3)}),
        r"d2t is \[3\] of torch.float32, expected one row",
    ),
    (
        lambda p: write3(p, {"d2t": torch.tensor([5, 5, 5])}),
        "t2d marks 3 .* to 3, and the two disagree about 4",
    ),
    (lambda p: write3(p, {"t2d": torch.ones(20).bool()}), "t2d marks 20 .* leads to 3"),
    (lambda p: write3(p, {"t2d": torch.ones(21).bool()}), r"t2d is \[21\], the target's .* has 20"),
    (lambda p: write3(p, {"lm_head.weight": None}), "lm_head.weight is missing"),
    (lambda p: write3(p, {"lm_head.weight": torch.ones(4, 8)}), "4 rows, .* 3 tokens, .* 20"),
    (lambda p: write3(p, {"fc.bias": torch.ones(8)}), "fc.bias has no place in an EAGLE-3 head"),
    (lambda p: write3(p, {"fc.weight": torch.ones(8, 16)}), r"is \[8, 16\], expected \[8, 24\]"),
    (lambda p: write3(p, {}, draft_vocab_size=4), "draft_vocab_size is 4, .* to 3 of"),
    (
        lambda p: write3(p, {}, hidden_size=12, target_hidden_size=8),
        r"embed_tokens.* \[20, 12\] is",
    ),
    (lambda p: write3(p, {}, eagle_aux_hidden_state_layer_ids=[1, 2, 7]), r"\[1, 2, 7\], .* has 6"),
    (lambda p: write3(p, {}, eagle_aux_hidden_state_layer_ids=[1, 2]), "expected 3 of them"),
    (lambda p: write3(p, {}, norm_before_fc=True), "norm_before_fc = True is not supported"),
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
    target = replace(TARGET, vocab_size=49152, hidden_size=576)
    embedding = torch.zeros(49152, 576)
    head = load_head(shipped_head(), target, embedding, embedding, torch.bfloat16, CPU)
    assert isinstance(head, EagleHead)
    assert head.lm_head.shape == (8192, 576)
    assert head.fc_bias is None
    assert head.identity.startswith("eagle2-smollm2-135m@")
