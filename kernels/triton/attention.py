"""Attention over token slots.

The chunk function is compiled once for a shape of heads: a plain step, a tree node and a prefill
row go through the same instructions with the same layout. Merges are elementwise with explicit
fused multiply-adds, so that it makes no difference in which kernel they happen. After Dao,
FlashAttention-2 (2023), with the split over the context of Flash-Decoding.
"""

# Triton compiles these functions: they are Python by their syntax alone.
# pyright: basic, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from kernels.triton.fp8 import from_fp8


@triton.jit
def spell_paths(
    batch: tl.tensor, keys: tl.tensor, table: tl.tensor, chunk: tl.constexpr, tree: tl.constexpr
):
    """A row's own list in `keys`, from the batch's: what is left of the context, then the tail keys
    that its ancestry word names, then -1."""
    entry = table + tl.program_id(0) * 11
    own = keys + tl.load(entry + 6)
    rest_at, rest, tail = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)
    word = tl.load(batch + tl.load(entry + 10))
    position = tl.arange(0, chunk)
    in_rest = position < rest
    tl.store(own + position, tl.load(batch + rest_at + position, mask=in_rest), mask=in_rest)
    j = tl.arange(0, tree)
    one = tl.full([tree], 1, tl.int64)
    named = ((word & (one << j)) != 0) & (j < tail)
    slot = tl.load(batch + rest_at + rest + j, mask=named, other=-1)
    # Every lane writes another place: the named ones in their order, then the others.
    before = tl.cumsum(named.to(tl.int32), 0) - named.to(tl.int32)
    place = tl.where(named, before, tl.sum(named.to(tl.int32), 0) + j - before)
    tl.store(own + rest + place, slot)


@triton.jit
def shares_of(one, other):
    """The higher of two maxima, and by what the states that they belong to are weighted: a state
    without keys (-inf) by exactly 0, and the other one then by exactly 1."""
    highest = tl.maximum(one, other)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    return highest, tl.exp2(one - base), tl.exp2(other - base)


@triton.jit
def load_keys(pool: tl.tensor, offsets, mask, quantized: tl.constexpr, like: tl.constexpr):
    tile = tl.load(pool + offsets, mask=mask, other=0)
    if quantized:
        tile = from_fp8(tile).to(like)
    return tile


@triton.jit(do_not_specialize=["q_stride"])
def attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, keys: tl.tensor, units: tl.tensor,
    mixed: tl.tensor, stats: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor,
    q_stride, scale,
    heads: tl.constexpr, kv_heads: tl.constexpr, d: tl.constexpr, lanes: tl.constexpr,
    queries: tl.constexpr, step: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """One unit for one KV head: its chunks, each by a running softmax over steps of keys, merged in
    order. `lanes` is d rounded up to a power of two, `q_stride` is in heads."""
    kv_head = tl.program_id(0) % kv_heads
    entry = units + (tl.program_id(0) // kv_heads) * 8
    first, rows, keys_at = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    visible, causal = tl.load(entry + 3), tl.load(entry + 4)
    first_chunk, chunks, state = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    group: tl.constexpr = heads // kv_heads
    row = tl.arange(0, queries) // group
    head = kv_head * group + tl.arange(0, queries) % group
    dims = tl.arange(0, lanes)
    live = (row < rows)[:, None] & (dims < d)[None, :]
    of_q = ((first + row).to(tl.int64) * q_stride + head) * d
    q_tile = tl.load(q + of_q[:, None] + dims[None, :], mask=live, other=0)
    quantized: tl.constexpr = k_scale is not None
    if quantized:
        scale *= tl.load(k_scale + kv_head)
    limit = visible + row * causal  # row sees keys [0, limit)
    most = visible + (rows - 1) * causal
    row_of_pool = kv_heads * d
    total_highest = tl.full([queries], -float("inf"), tl.float32)
    total_sum = tl.zeros([queries], tl.float32)
    total = tl.zeros([queries, lanes], tl.float32)
    for index in range(first_chunk, first_chunk + chunks):
        highest = tl.full([queries], -float("inf"), tl.float32)
        sums = tl.zeros([queries], tl.float32)
        acc = tl.zeros([queries, lanes], tl.float32)
        for at in range(index * chunk, tl.minimum(index * chunk + chunk, most), step):
            position = at + tl.arange(0, step)
            slot = tl.load(keys + keys_at + position, mask=position < most, other=-1)
            there = slot >= 0
            offsets = (slot * row_of_pool)[:, None] + dims[None, :]
            read = there[:, None] & (dims < d)[None, :]
            k_tile = load_keys(k + kv_head * d, offsets, read, quantized, q.dtype.element_ty)
            scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
            seen = there[None, :] & (position[None, :] < limit[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            now = tl.maximum(highest, tl.max(scores, 1))
            base = tl.where(now == -float("inf"), 0.0, now)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(highest - base)
            sums = tl.fma(sums, kept, tl.sum(weights, 1))
            v_tile = load_keys(v + kv_head * d, offsets, read, quantized, q.dtype.element_ty)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * kept[:, None])
            highest = now
        total_highest, old, new = shares_of(total_highest, highest)
        total_sum = tl.fma(total_sum, old, sums * new)
        total = tl.fma(total, old[:, None], acc * new[:, None])
    if state >= 0:
        of_state = (state + row).to(tl.int64) * heads + head
        tl.store(mixed + of_state[:, None] * d + dims[None, :], total, mask=live)
        tl.store(stats + of_state * 2, total_highest, mask=row < rows)
        tl.store(stats + of_state * 2 + 1, total_sum, mask=row < rows)
    else:
        result = tl.math.div_rn(total, total_sum[:, None] + tl.zeros_like(total))
        if quantized:
            result *= tl.load(v_scale + kv_head)
        of_out = (first + row).to(tl.int64) * (heads * d) + head * d
        tl.store(out + of_out[:, None] + dims[None, :], result, mask=live)


@triton.jit
def merge(
    mixed: tl.tensor, stats: tl.tensor, table: tl.tensor, out: tl.tensor, v_scale: tl.tensor,
    heads: tl.constexpr, kv_heads: tl.constexpr, d: tl.constexpr, lanes: tl.constexpr,
    ahead: tl.constexpr,
):  # fmt: skip
    """The states of one query head of one row of a tree, from the first chunk to the last; `ahead`
    states are loaded together, which changes no sum."""
    head = tl.program_id(0) % heads
    entry = table + (tl.program_id(0) // heads) * 11
    row, shared, shared_step = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    whole, own, parts = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    dims = tl.arange(0, lanes)
    highest = tl.full([lanes], -float("inf"), tl.float32)
    sums = tl.zeros([lanes], tl.float32)
    total = tl.zeros([lanes], tl.float32)
    for begin in range(0, whole + parts, ahead):
        for i in tl.static_range(ahead):
            index = begin + i
            there = index < whole + parts
            state = tl.where(index < whole, shared + index * shared_step, own + index - whole)
            at = state.to(tl.int64) * heads + head
            part = tl.load(mixed + at * d + dims, mask=there & (dims < d), other=0.0)
            part_highest = tl.load(stats + at * 2, mask=there, other=-float("inf"))
            part_sum = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
            highest, old, new = shares_of(highest, part_highest + tl.zeros_like(highest))
            sums = tl.fma(sums, old, part_sum * new)
            total = tl.fma(total, old, part * new)
    result = tl.math.div_rn(total, sums)
    if v_scale is not None:
        result *= tl.load(v_scale + head // (heads // kv_heads))
    tl.store(out + row.to(tl.int64) * (heads * d) + head * d + dims, result, mask=dims < d)
