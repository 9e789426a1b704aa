"""The decoder, written once for every family of the Llama kind.

Tensors in, tensors out: a pass takes the rows of a whole batch (trees, single tokens and prefill
chunks together), writes their K/V into slots and returns their features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig
from kernels import ops
from kernels.batch import AttentionBatch, KVCache


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with q, k, v and gate, up fused along their outputs."""

    input_norm: Tensor | None  # [hidden]; None: the layer takes its input as it is (EAGLE-1/2)
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angles of rotary position embedding, made on the fly so that no length is built in."""

    inverse_frequencies: Tensor  # [head_dim / 2] fp32
    scale: float  # of cos and sin (yarn), else 1

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, head_dim / 2] (fp32) of positions [rows]."""
        angles = positions.float()[:, None] * self.inverse_frequencies[None, :]
        return angles.cos() * self.scale, angles.sin() * self.scale


def new_cache(
    config: DecoderConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty pool. Zeros, since masked lanes must hold finite numbers."""
    shape = (config.layers, slots, config.kv_heads, config.head_dim)
    return KVCache(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
    )


def attention_block(
    x: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
) -> Tensor:
    """Self-attention of normed rows x [rows, in] -> [rows, hidden]; writes K/V of `layer`."""
    rows = x.shape[0]
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
    q, k, v = (
        part.view(rows, -1, config.head_dim) for part in qkv.split((q_size, kv_size, kv_size), -1)
    )
    if weights.q_norm is not None and weights.k_norm is not None:
        q = ops.rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = ops.rms_norm(k, weights.k_norm, config.rms_norm_eps)
    ops.write_kv(cache.k[layer], batch.slots, ops.rope(k, *angles))
    ops.write_kv(cache.v[layer], batch.slots, v)
    mixed = ops.tree_attention(ops.rope(q, *angles), cache.k[layer], cache.v[layer], batch)
    return ops.linear(mixed.view(rows, q_size), weights.o, weights.o_bias)


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
) -> Tensor:
    """One pre-norm layer over hidden [rows, hidden] -> [rows, hidden]."""
    normed = hidden
    if weights.input_norm is not None:
        normed = ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    hidden = hidden + attention_block(normed, weights, config, angles, cache, layer, batch)
    normed = ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    gated = ops.silu_mul(ops.linear(normed, weights.gate_up, weights.gate_up_bias))
    return hidden + ops.linear(gated, weights.down, weights.down_bias)


class Decoder:
    """The target model: weights and the forward pass over a batch of rows."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, rotary: RotaryTable) -> None:
        self.config = config
        self.weights = weights
        self.rotary = rotary
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device

    def new_cache(self, slots: int) -> KVCache:
        return new_cache(self.config, slots, self.dtype, self.device)

    def forward(self, tokens: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """Features (after the final norm) [rows, hidden] of tokens [rows]; K/V go into `cache`."""
        hidden = self.weights.embedding[tokens]
        angles = self.rotary(batch.positions)
        for index, layer in enumerate(self.weights.layers):
            hidden = decoder_layer(hidden, layer, self.config, angles, cache, index, batch)
        return ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 of features [rows, hidden]."""
        return ops.linear(features, self.weights.lm_head).float()
