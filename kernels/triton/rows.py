"""Norm, gated activation, rotary embedding: a program looks at one row, whatever else there is.

Where kernels.reference rounds to the type of its operands, these do too.
"""

# Triton compiles these functions: they are Python by their syntax alone.
# pyright: basic, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from kernels.triton.fp8 import to_fp8


@triton.jit(do_not_specialize=["outer_stride", "inner_stride"])
def norm(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, added: tl.tensor,
    inner, outer_stride, inner_stride, eps,
    d: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Row (i, j) of x [outer, inner, d], strides in units of d; with a residual, `added` takes
    x + residual, which is then normed."""
    index = tl.program_id(0)
    at = tl.arange(0, lanes)
    inside = at < d
    start = (index // inner).to(tl.int64) * outer_stride + (index % inner) * inner_stride
    value = tl.load(x + start * d + at, mask=inside, other=0.0)
    flat = index.to(tl.int64) * d + at
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + flat, mask=inside, other=0.0)).to(
            x.dtype.element_ty
        )
        tl.store(added + flat, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / d + eps)
    normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + flat, normed * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def gate(gate_up: tl.tensor, out: tl.tensor, d: tl.constexpr, block: tl.constexpr):
    """A block of one row: silu(gate) * up."""
    blocks: tl.constexpr = (d + block - 1) // block
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = at < d
    x = tl.load(gate_up + row * 2 * d + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * d + d + at, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(x, 1.0 + tl.exp(-x)).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * d + at, silu * up, mask=inside)


@triton.jit
def rotated(x, cos, sin, at, half: tl.constexpr, inside):
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + at, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["x_stride"])
def rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, x_stride,
    heads: tl.constexpr, half: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One head of one row of x [rows, heads, 2 * half]; x_stride is in heads."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at = tl.arange(0, lanes)
    inside = at < half
    of_cos = tl.load(cos + row * half + at, mask=inside, other=0.0)
    of_sin = tl.load(sin + row * half + at, mask=inside, other=0.0)
    head_of_x = x + (row * x_stride + head) * 2 * half
    first, second = rotated(head_of_x, of_cos, of_sin, at, half, inside)
    to = out + (row * heads + head) * 2 * half + at
    tl.store(to, first, mask=inside)
    tl.store(to + half, second, mask=inside)


@triton.jit
def put(pool: tl.tensor, at, value, inside, scales: tl.tensor, head):
    if scales is not None:
        value = to_fp8(tl.div_rn(value, tl.zeros_like(value) + tl.load(scales + head)))
    tl.store(pool + at, value, mask=inside)


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"])
def rotate_and_write(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor,
    out: tl.tensor, k_pool: tl.tensor, v_pool: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor,
    q_stride, k_stride, v_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One head of one row: of q it is rotated into `out`, of k rotated into its slot, of v copied
    into its slot. Strides are in heads."""
    each: tl.constexpr = heads + 2 * kv_heads
    row, head = (tl.program_id(0) // each).to(tl.int64), tl.program_id(0) % each
    at = tl.arange(0, lanes)
    inside = at < half
    d: tl.constexpr = 2 * half
    of_cos = tl.load(cos + row * half + at, mask=inside, other=0.0)
    of_sin = tl.load(sin + row * half + at, mask=inside, other=0.0)
    if head < heads:
        first, second = rotated(q + (row * q_stride + head) * d, of_cos, of_sin, at, half, inside)
        rotated_q = out + (row * heads + head) * d + at
        tl.store(rotated_q, first, mask=inside)
        tl.store(rotated_q + half, second, mask=inside)
    elif head < heads + kv_heads:
        mine = head - heads
        first, second = rotated(k + (row * k_stride + mine) * d, of_cos, of_sin, at, half, inside)
        to = (tl.load(slots + row) * kv_heads + mine) * d + at
        rounded = q.dtype.element_ty
        put(k_pool, to, first.to(rounded).to(tl.float32), inside, k_scale, mine)
        put(k_pool, to + half, second.to(rounded).to(tl.float32), inside, k_scale, mine)
    else:
        mine = head - heads - kv_heads
        from_v = v + (row * v_stride + mine) * d + at
        first = tl.load(from_v, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(from_v + half, mask=inside, other=0.0).to(tl.float32)
        to = (tl.load(slots + row) * kv_heads + mine) * d + at
        put(v_pool, to, first, inside, v_scale, mine)
        put(v_pool, to + half, second, inside, v_scale, mine)
