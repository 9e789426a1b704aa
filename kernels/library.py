"""The operations as `torch.ops.coppice.*`, for those who trace, compile or export a model of
theirs: each is one node with known shapes, and computes what `kernels.ops` computes.

Coppice itself calls `kernels.ops`: on a small row a call through torch takes several times as long.
They have no gradients; those are plain torch's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from kernels import ops
from kernels.batch import AttentionBatch, Segment


def _like_first(first: Tensor, *_: object) -> Tensor:
    return first.new_empty(first.shape)


@custom_op("coppice::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, wide: bool
) -> Tensor:
    return ops.linear(x, weight, bias, residual, wide)


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, wide: bool
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if wide else x.dtype)


@custom_op("coppice::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)


rms_norm.register_fake(_like_first)


@custom_op("coppice::silu_mul", mutates_args=())
def silu_mul(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up)


@silu_mul.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@custom_op("coppice::rope_and_write", mutates_args=("k_pool", "v_pool"))
def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
) -> Tensor:
    return ops.rope_and_write(q, k, v, (cos, sin), (k_pool, v_pool), slots)


rope_and_write.register_fake(_like_first)


@custom_op("coppice::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Sequence[int],
    contexts: Sequence[Tensor],
    tails: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> Tensor:
    """A Segment per entry of `rows`, `contexts`, `tails` and `masks`; an empty mask is causal."""
    segments = tuple(
        Segment(count, context, tail, mask if len(mask) else None)
        for count, context, tail, mask in zip(rows, contexts, tails, masks, strict=True)
    )
    return ops.tree_attention(q, k_pool, v_pool, AttentionBatch(slots, positions, segments))


tree_attention.register_fake(_like_first)


@custom_op("coppice::sample", mutates_args=())
def sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniforms: Tensor
) -> Tensor:
    return ops.sample(logits, temperature, top_k, top_p, min_p, uniforms)


@sample.register_fake
def _(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniforms: Tensor
) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)
