"""A checkpoint directory with random weights, of any shape: for measurements and tests."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from coppice.models.config import DecoderConfig

# What Qwen2.5-0.5B has, but for its biases.
HALF_BILLION = {
    "model_type": "llama",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write_target(
    path: Path, published: Mapping[str, object], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Writes a `config.json` and the weights that it asks for into the existing directory."""
    config = DecoderConfig.from_hf(published)
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        """Large enough for logits to differ, and for hidden vectors not to grow."""
        return (torch.randn(shape, generator=make) * 1.5 * shape[-1] ** -0.5).to(dtype)

    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", q, hidden, config.attention_bias),
        ("self_attn.k_proj", kv, hidden, config.attention_bias),
        ("self_attn.v_proj", kv, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    tensors = {"model.norm.weight": 1 + random(hidden)}
    tensors["model.embed_tokens.weight"] = 3 * random(config.vocab_size, hidden)
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = 3 * random(config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, outputs, inputs, biased in projections:
            tensors[f"{prefix}.{name}.weight"] = random(outputs, inputs)
            if biased:
                tensors[f"{prefix}.{name}.bias"] = random(outputs)
        for name, size in norms:
            tensors[f"{prefix}.{name}.weight"] = 1 + random(size)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(published)))
    return path
