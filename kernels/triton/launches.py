"""From tensors to launches: pure functions that look at shapes and types alone.

Everything that decides which binary runs (constants, warps, stages) comes from here and from
tiles, for calls and for kernels.triton.compile_table alike. Sizes that go with the number of rows
are never constants, nor does a kernel specialize for them; strides are given in units of d, so that
the alignment that the compiler sees is d's.
"""

import torch
import triton.language as tl
from torch import Tensor

from kernels.triton import attention, linear, rows, sample
from kernels.triton.launch import Launch
from kernels.triton.tiles import CHUNK, TREE, AttentionTile, LinearTile

LOG2_E = 1.4426950408889634
RESULT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    added: Tensor | None,
    eps: float,
) -> Launch:
    """x [outer, inner, d] as checks.as_rows gives it; residual, out and added are contiguous."""
    outer, inner, d = x.shape
    lanes = power_of_two(d)
    return Launch(
        rows.norm,
        outer * inner,
        (x, residual, weight, out, added, inner, x.stride(0) // d, x.stride(1) // d, eps),
        {"d": d, "lanes": lanes},
        warps=max(1, min(8, lanes // 512)),
    )


def gate(gate_up: Tensor, out: Tensor) -> Launch:
    count, d = out.shape
    block = min(1024, power_of_two(d))
    programs = count * parts(d, block)
    return Launch(rows.gate, programs, (gate_up, out), {"d": d, "block": block}, warps=4)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Launch:
    count, heads, d = x.shape
    constants = {"heads": heads, "half": d // 2, "lanes": power_of_two(d // 2)}
    return Launch(
        rows.rotate, count * heads, (x, cos, sin, out, x.stride(0) // d), constants, warps=1
    )


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, out: Tensor,
    k_pool: Tensor, v_pool: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
) -> Launch:  # fmt: skip
    count, heads, d = q.shape
    kv_heads = k.shape[1]
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "half": d // 2,
        "lanes": power_of_two(d // 2),
    }
    tensors = (q, k, v, cos, sin, slots, out, as_bytes(k_pool), as_bytes(v_pool), k_scale, v_scale)
    strides = (q.stride(0) // d, k.stride(0) // d, v.stride(0) // d)
    programs = count * (heads + 2 * kv_heads)
    return Launch(rows.rotate_and_write, programs, (*tensors, *strides), constants, warps=1)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    sums: Tensor | None, tile: LinearTile,
) -> Launch:  # fmt: skip
    count, inputs = x.shape
    outputs = weight.shape[0]
    constants = {
        "outputs": outputs,
        "inputs": inputs,
        "splits": tile.splits,
        "block_rows": tile.rows,
        "block_outputs": tile.outputs,
        "block_inputs": tile.inputs,
    }
    programs = parts(count, tile.rows) * parts(outputs, tile.outputs) * tile.splits
    arguments = (x, weight, bias, residual, out, sums, count)
    return Launch(linear.multiply, programs, arguments, constants, tile.warps, tile.stages)


def add_splits(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, dtype: torch.dtype
) -> Launch:
    splits, count, outputs = sums.shape
    block = 1024
    constants = {
        "outputs": outputs,
        "splits": splits,
        "block": block,
        "rounded": RESULT_TYPES[dtype],
    }
    size = count * outputs
    arguments = (sums, bias, residual, out, size)
    return Launch(linear.add_splits, parts(size, block), arguments, constants, warps=4)


def spell_paths(batch: Tensor, keys: Tensor, table: Tensor) -> Launch:
    constants = {"chunk": CHUNK, "tree": TREE}
    return Launch(attention.spell_paths, len(table), (batch, keys, table), constants, warps=4)


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, keys: Tensor, units: Tensor,
    mixed: Tensor, stats: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    tile: AttentionTile,
) -> Launch:  # fmt: skip
    _, heads, d = q.shape
    kv_heads = k_pool.shape[1]
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "d": d,
        "lanes": lanes_of(d),
        "queries": tile.queries,
        "step": tile.keys,
        "chunk": CHUNK,
    }
    tensors = (q, as_bytes(k_pool), as_bytes(v_pool), out, keys, units, mixed, stats)
    arguments = (*tensors, k_scale, v_scale, q.stride(0) // d, d**-0.5 * LOG2_E)
    programs = len(units) * kv_heads
    return Launch(attention.attend, programs, arguments, constants, tile.warps, tile.stages)


def merge(
    mixed: Tensor, stats: Tensor, table: Tensor, out: Tensor, v_scale: Tensor | None, kv_heads: int
) -> Launch:
    _, heads, d = out.shape
    constants = {"heads": heads, "kv_heads": kv_heads, "d": d, "lanes": lanes_of(d), "ahead": 8}
    arguments = (mixed, stats, table, out, v_scale)
    return Launch(attention.merge, len(table) * heads, arguments, constants, warps=1)


def draw(
    logits: Tensor, mass: Tensor, out: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor,
    top_p: Tensor, uniform: Tensor,
) -> Launch:  # fmt: skip
    count, vocab = logits.shape
    constants = {"vocab": vocab, "block": min(2048, power_of_two(vocab))}
    arguments = (logits, mass, out, temperature, min_p, top_k, top_p, uniform)
    return Launch(sample.draw, count, arguments, constants, warps=8)


def parts(whole: int, part: int) -> int:
    return -(-whole // part)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def lanes_of(head_dim: int) -> int:
    """Matrix instructions take multiples of 16, Triton powers of two."""
    return max(16, power_of_two(head_dim))


def as_bytes(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
