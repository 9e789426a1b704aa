"""GGUF files as llama.cpp's own library writes them become checkpoints that compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM

from benchmarks.peers_llama_cpp import write_bf16
from coppice.errors import StartError
from coppice.models.gguf import convert_gguf

VOCAB = 300
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Write = Callable[..., Path]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, role = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[role]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@pytest.fixture
def write(tmp_path: Path, published: Any) -> Write:
    """A GGUF file of a random model with a byte-level tokenizer: (path, the model)."""

    def write_gguf(
        family: str = "llama",
        quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
        architecture: str | None = None,
        pre: str = "smollm",
        extra: Callable[[GGUFWriter], None] = lambda writer: None,
        **settings: Any,
    ) -> tuple[Path, Any]:
        _, model = published(family, **{**SHAPE, **settings})
        architecture = architecture or family
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, architecture)
        config = model.config
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(16)
        writer.add_rope_dimension_count(16)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        add_tokenizer(writer, pre)
        extra(writer)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = weight.numpy()
            if family == "llama" and name.split(".")[-2] in heads:
                values = interleaved(values, heads[name.split(".")[-2]])
            kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, model

    return write_gguf


def add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    tokens = ["<|end|>", "<|start|>", *byte_alphabet(), "12", "Ġa"]
    padding = [f"<pad{index}>" for index in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2), *[5] * len(padding)])
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def converted(source: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert_gguf(source, directory)
    return directory


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_weights_come_back_in_the_order_of_hugging_face(
    family: str, settings: dict[str, Any], write: Write, tmp_path: Path
) -> None:
    source, model = write(family, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path), dtype=torch.float32)
    expected = model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name].bfloat16().float(), atol=0, rtol=0)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0", "F16", "BF16"])
def test_quantized_weights_are_near_the_original(kind: str, write: Write, tmp_path: Path) -> None:
    source, model = write(quantization=GGMLQuantizationType[kind])
    found = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path), dtype=torch.float32)
    expected = model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    error = (found.state_dict()["model.layers.0.mlp.up_proj.weight"] - expected).abs().max()
    assert error < (0.15 if kind.startswith("Q4") else 0.01)


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["1", "2", "x", "Ġa", "Ġ", "1"]),
        ("gpt-2", ["12", "x", "Ġa", "Ġ", "1"]),
        ("llama-bpe", ["<|start|>", "12", "x", "Ġa", "Ġ", "1"]),
        ("qwen2", ["1", "2", "x", "Ġa", "Ġ", "1"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_cut(
    pre: str, tokens: list[str], write: Write, tmp_path: Path
) -> None:
    directory = converted(write(pre=pre)[0], tmp_path)
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    assert fast.encode("12x a 1").tokens == tokens


def test_control_tokens_are_found_in_text_and_special(write: Write, tmp_path: Path) -> None:
    directory = converted(write()[0], tmp_path)
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    ids = fast.encode("<|start|>x<|end|>").ids
    assert (ids[0], ids[-1], fast.decode(ids)) == (1, 0, "x")


def refused(source: Path, tmp_path: Path, named: str) -> None:
    with pytest.raises(StartError, match=named) as refusal:
        convert_gguf(source, tmp_path)
    assert "\n" not in str(refusal.value)


def test_an_unknown_pre_tokenizer_is_refused(write: Write, tmp_path: Path) -> None:
    refused(write(pre="deepseek-llm")[0], tmp_path, "'deepseek-llm' is not supported")


def test_an_unknown_architecture_is_refused(write: Write, tmp_path: Path) -> None:
    refused(write(architecture="gemma")[0], tmp_path, "'gemma' is not supported; only llama")


def test_a_mixture_of_experts_is_refused(write: Write, tmp_path: Path) -> None:
    source, _ = write(extra=lambda writer: writer.add_expert_count(8))
    refused(source, tmp_path, "mixture of experts")


def test_a_tensor_that_is_not_known_is_refused(write: Write, tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))

    refused(write(extra=add)[0], tmp_path, "rope_freqs.weight is not supported")


@pytest.mark.parametrize("kept", [0, 3, 20, 400, 100_000])
def test_a_truncated_file_is_refused(kept: int, write: Write, tmp_path: Path) -> None:
    source, _ = write()
    source.write_bytes(source.read_bytes()[:kept])
    refused(source, tmp_path, "not a whole GGUF file")


def test_the_copy_for_llama_cpp_is_the_same_model_in_bf16(write: Write, tmp_path: Path) -> None:
    source, _ = write(quantization=GGMLQuantizationType.Q8_0)
    write_bf16(source, tmp_path / "copy.gguf")
    made = [tmp_path / name for name in ("made", "copied")]
    for path, directory in zip((source, tmp_path / "copy.gguf"), made, strict=True):
        directory.mkdir()
        convert_gguf(path, directory)
    for file in sorted(made[0].iterdir()):
        assert (made[1] / file.name).read_bytes() == file.read_bytes(), file.name
