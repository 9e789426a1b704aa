"""From a GGUF file (llama.cpp) to a checkpoint directory as Hugging Face publishes them."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from safetensors.torch import save_file
from torch import Tensor

from coppice.errors import StartError
from coppice.models.gguf_metadata import GgufMetadata
from coppice.models.gguf_tokenizer import tokenizer_json

# GGUF architecture -> (model type, class in transformers).
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# llama.cpp stores q and k of this architecture with the rotary halves interleaved.
INTERLEAVED_ARCHITECTURE = "llama"
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    source: Path, directory: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes config, bf16 weights and tokenizer of `source` into the existing `directory`.

    `progress` hears of (tensors done, tensors in all). Raises StartError when the file is broken
    or something in it is not supported.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise StartError(f"{source} is not a whole GGUF file: {error}") from None
    metadata = GgufMetadata(reader, source)
    if metadata.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        found = metadata.architecture
        raise StartError(f"{source}: architecture {found!r} is not supported; only {supported}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in _tensors(reader, metadata, source):
        tensors[name] = tensor
        if progress is not None:
            progress(len(tensors), len(reader.tensors))
    config = _config(metadata, tensors.keys())
    tokenizer = tokenizer_json(metadata)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(metadata))
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def _tensors(
    reader: GGUFReader, metadata: GgufMetadata, source: Path
) -> Iterator[tuple[str, Tensor]]:
    heads = {"attn_q": metadata.heads, "attn_k": metadata.kv_heads}
    for stored in reader.tensors:
        role, kind = stored.name.rsplit(".", 1)
        layer = None
        if role.startswith("blk."):
            _, layer, role = role.split(".", 2)
        name = GLOBAL_NAMES.get(role) if layer is None else LAYER_NAMES.get(role)
        if name is None:
            raise StartError(
                f"{source}: tensor {stored.name} is not supported; use the model's safetensors"
            )
        tensor = _dequantized(stored, source)
        if metadata.architecture == INTERLEAVED_ARCHITECTURE and role in heads:
            tensor = deinterleaved(tensor, heads[role])
        prefix = "" if layer is None else f"model.layers.{layer}."
        yield f"{prefix}{name}.{kind}", tensor.to(torch.bfloat16).contiguous()


def _dequantized(stored: ReaderTensor, source: Path) -> Tensor:
    try:
        return torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise StartError(
            f"{source}: tensor {stored.name} is quantized as {kind}, which cannot be read; use "
            "another quantization or the model's safetensors"
        ) from None


def deinterleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads * head_dim, ...] back from (pair, half) to (half, pair) order."""
    shape = weight.shape
    return (
        weight.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)
    )


def _config(metadata: GgufMetadata, names: Collection[str]) -> dict[str, object]:
    model_type, architecture = ARCHITECTURES[metadata.architecture]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(metadata.tokens),
        "hidden_size": metadata.hyperparameter("embedding_length"),
        "intermediate_size": metadata.hyperparameter("feed_forward_length"),
        "num_hidden_layers": metadata.hyperparameter("block_count"),
        "num_attention_heads": metadata.heads,
        "num_key_value_heads": metadata.kv_heads,
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.hyperparameter("context_length"),
        "rms_norm_eps": metadata.rms_norm_eps,
        "rope_theta": metadata.rope_theta,
        "rope_scaling": metadata.rope_scaling,
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": metadata.special_id("bos"),
        "eos_token_id": metadata.special_id("eos"),
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(metadata: GgufMetadata) -> dict[str, object]:
    special = {f"{kind}_token": metadata.special_token(kind) for kind in ("bos", "eos", "unknown")}
    special["unk_token"] = special.pop("unknown_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata.chat_template,
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    present = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(present, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
