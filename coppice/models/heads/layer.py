"""The one decoder layer of a head, read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig
from kernels.layer import LayerWeights

LAYER = "layer"

Read = Callable[[str, Sequence[int]], Tensor]


def read_layer(
    read: Read, holds: Callable[[str], bool], config: DecoderConfig, inputs: int
) -> LayerWeights:
    """The layer of a head, without a norm of its input; q, k and v take `inputs` values.

    Biases, and norms of q and k, are where the file has them: configs of published heads repeat
    the target's family, whatever the head was trained with.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.heads * dim, config.kv_heads * dim

    def weight(name: str, *shape: int) -> Tensor:
        return read(f"{LAYER}.{name}.weight", shape)

    def norm_of_heads(name: str) -> Tensor | None:
        return weight(name, dim) if holds(f"{LAYER}.{name}.weight") else None

    def bias(*parts: tuple[str, int]) -> Tensor | None:
        if not any(holds(f"{LAYER}.{name}.bias") for name, _ in parts):
            return None
        return torch.cat([read(f"{LAYER}.{name}.bias", (size,)) for name, size in parts])

    qkv = (
        ("self_attn.q_proj", q_size),
        ("self_attn.k_proj", kv_size),
        ("self_attn.v_proj", kv_size),
    )
    gate_up = (("mlp.gate_proj", inner), ("mlp.up_proj", inner))
    return LayerWeights(
        input_norm=None,
        qkv=torch.cat([weight(name, size, inputs) for name, size in qkv]),
        qkv_bias=bias(*qkv),
        q_norm=norm_of_heads("self_attn.q_norm"),
        k_norm=norm_of_heads("self_attn.k_norm"),
        o=weight("self_attn.o_proj", hidden, q_size),
        o_bias=bias(("self_attn.o_proj", hidden)),
        post_norm=weight("post_attention_layernorm", hidden),
        gate_up=torch.cat([weight(name, size, hidden) for name, size in gate_up]),
        gate_up_bias=bias(*gate_up),
        down=weight("mlp.down_proj", hidden, inner),
        down_bias=bias(("mlp.down_proj", hidden)),
    )
