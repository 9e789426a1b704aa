"""The decoder, written once for every family of the Llama kind.

Tensors in, tensors out: a pass takes the rows of a whole batch (trees, single tokens and prefill
chunks together), writes their K/V into slots and returns their features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig
from kernels import ops
from kernels.batch import AttentionBatch, KVCache
from kernels.layer import LayerSizes, LayerWeights
from kernels.packed import Weight

# From one rank's sums [rows, hidden] in fp32, a bias [hidden] and a residual [rows, hidden] to what
# all ranks' sums, bias and residual give together [rows, hidden].
Combine = Callable[[Tensor, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Weight  # [vocab, hidden]; the embedding itself when tied


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angles of rotary position embedding, made on the fly so that no length is built in."""

    inverse_frequencies: Tensor  # [head_dim / 2] fp32
    scale: float  # of cos and sin (yarn), else 1

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, head_dim / 2] (fp32) of positions [rows]."""
        return ops.rotary_angles(positions, self.inverse_frequencies, self.scale)


def new_cache(
    config: DecoderConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty pool. Zeros, since masked lanes must hold finite numbers."""
    shape = (config.layers, slots, config.kv_heads, config.head_dim)
    return KVCache(ops.zeros(shape, dtype, device), ops.zeros(shape, dtype, device))


def layer_sizes(config: DecoderConfig) -> LayerSizes:
    return LayerSizes(config.heads, config.kv_heads, config.head_dim, config.rms_norm_eps)


def attention(
    x: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
) -> Tensor:
    """Mixed heads [rows, heads * head_dim] of normed rows x [rows, in]; writes K/V of `layer`."""
    rows = x.shape[0]
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
    q, k, v = (
        part.view(rows, -1, config.head_dim) for part in qkv.split((q_size, kv_size, kv_size), -1)
    )
    if weights.q_norm is not None and weights.k_norm is not None:
        q = ops.rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = ops.rms_norm(k, weights.k_norm, config.rms_norm_eps)
    pools = cache.k[layer], cache.v[layer]
    q = ops.rope_and_write(q, k, v, angles, pools, batch.slots)
    mixed = ops.tree_attention(q, *pools, batch)
    return mixed.view(rows, q_size)


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    combine: Combine | None = None,
) -> Tensor:
    """One pre-norm layer over hidden [rows, hidden] -> [rows, hidden]. `combine`: these weights
    are one rank's part of it."""
    normed = hidden
    if weights.input_norm is not None:
        normed = ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    mixed = attention(normed, weights, config, angles, cache, layer, batch)
    return after_attention(mixed, hidden, weights, config, combine)


def after_attention(
    mixed: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    combine: Combine | None = None,
) -> Tensor:
    """The rest of a layer, from mixed heads [rows, heads * head_dim] and what they are added to
    [rows, hidden] -> [rows, hidden]."""
    hidden = row_parallel(mixed, weights.o, weights.o_bias, residual, combine)
    normed = ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    gated = ops.gated_linear(normed, weights.gate_up, weights.gate_up_bias)
    return row_parallel(gated, weights.down, weights.down_bias, hidden, combine)


def row_parallel(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, combine: Combine | None
) -> Tensor:
    """x [rows, in] @ weight [hidden, in]^T + bias + residual [rows, hidden], where a rank may hold
    some of the inputs only."""
    if combine is None:
        return ops.linear(x, weight, bias, residual=residual)
    return combine(ops.linear(x, weight, wide=True), bias, residual)


def decoder_layers(
    hidden: Tensor,
    layers: Sequence[LayerWeights],
    config: DecoderConfig,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    batch: AttentionBatch,
) -> Tensor:
    """All layers over hidden [rows, hidden] -> [rows, hidden]."""
    if ops.runs_layers(layers, hidden):
        return ops.run_layers(hidden, layers, angles, cache, batch)
    for index, layer in enumerate(layers):
        hidden = decoder_layer(hidden, layer, config, angles, cache, index, batch)
    return hidden


class Decoder:
    """The target model: weights and the forward pass over a batch of rows."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        rotary: RotaryTable,
        quantize: bool = False,
        own: DecoderConfig | None = None,
    ) -> None:
        """`quantize` packs what is not packed yet in int8, the embedding table excepted. `own`: the
        shape of the layers in `weights`, where that is one rank's part."""
        self.config = config
        self.own = own or config
        sizes = layer_sizes(self.own)
        layers = tuple(ops.pack_layer(layer, sizes, quantize) for layer in weights.layers)
        self.weights = replace(weights, layers=layers)
        # Apart from `weights`, where a tied head is the embedding itself.
        self.lm_head = ops.pack(weights.lm_head, quantize)
        self.rotary = rotary
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device

    def new_cache(self, slots: int) -> KVCache:
        return new_cache(self.own, slots, self.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [rows, hidden] of tokens [rows]."""
        return self.weights.embedding[tokens]

    def run_layers(
        self,
        hidden: Tensor,
        layers: range,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor:
        """Some of the layers over hidden [rows, hidden] -> [rows, hidden]."""
        part = self.weights.layers[layers.start : layers.stop]
        pools = KVCache(cache.k[layers.start : layers.stop], cache.v[layers.start : layers.stop])
        return decoder_layers(hidden, part, self.own, angles, pools, batch)

    def forward(self, tokens: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """Features (after the final norm) [rows, hidden] of tokens [rows]; K/V go into `cache`."""
        hidden = self.embed(tokens)
        angles = self.rotary(batch.positions)
        hidden = self.run_layers(hidden, range(self.config.layers), angles, cache, batch)
        return ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)

    def forward_with_inputs(
        self, tokens: Tensor, cache: KVCache, batch: AttentionBatch, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """What `forward` gives, bit for bit, and beside it the inputs of the layers `wanted` (each
        in [0, layers], where the last stands for the output of all), side by side in their order:
        [rows, len(wanted) * hidden]."""
        hidden = self.embed(tokens)
        angles = self.rotary(batch.positions)
        inputs: dict[int, Tensor] = {}
        start = 0
        for stop in sorted({*wanted, self.config.layers}):
            if stop > start:
                hidden = self.run_layers(hidden, range(start, stop), angles, cache, batch)
            inputs[stop] = hidden
            start = stop
        features = ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        return features, torch.cat([inputs[layer] for layer in wanted], -1)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 of features [rows, hidden]."""
        return ops.linear(features, self.lm_head, wide=True)

    def scores(self, features: Tensor, greedy: int) -> tuple[Tensor, Tensor]:
        """Of features [rows, hidden], the ids of the largest logits of the first `greedy` rows
        [greedy], and the logits of all others [rows - greedy, vocab] in fp32."""
        logits = self.logits(features)
        return ops.argmax(logits[:greedy]), logits[greedy:]
