"""Attention over slots: right, blind to what it may not read, and each row's bits its own.

Bits are compared in the interpreter too. There they say that a row's keys are the same, in the
same lanes, chunks and order of merging, wherever the row stands; of a GPU they say nothing.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import AttentionBatch, Segment
from kernels.triton.backend import Scales, TritonBackend
from kernels.triton.plan import ROW
from kernels.triton.plans import new_plan
from kernels.triton.tiles import CHUNK

SLOTS = 1000
CONTEXTS = st.one_of(
    st.integers(0, 20),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1]),
    st.integers(0, 600),
)
# KV heads, query heads of each, head dimension.
SHAPES = st.sampled_from([(1, 1, 64), (2, 3, 64), (1, 4, 96), (1, 5, 128), (1, 2, 256), (1, 1, 40)])
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


class Pools:
    """Random K and V; the slots beyond the first `used` of `order` are NaN."""

    def __init__(
        self, kv_heads: int, dim: int, dtype: torch.dtype, used: int, device: torch.device
    ) -> None:
        self.order = torch.randperm(SLOTS, device=device)
        shape = (SLOTS, kv_heads, dim)
        self.k = torch.randn(shape, device=device).to(dtype)
        self.v = torch.randn(shape, device=device).to(dtype)
        self.k[self.order[used:]] = torch.nan
        self.v[self.order[used:]] = torch.nan


def attend(backend: TritonBackend, q: Tensor, pools: Pools, *segments: Segment) -> Tensor:
    nothing = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    batch = AttentionBatch(nothing, nothing, segments)
    return backend.tree_attention(q, pools.k, pools.v, batch)


def exact(q: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> Tensor:
    """One row's attention over its slots, in float64: q [heads, d] -> [heads, d]."""
    k, v = k_pool[slots].double(), v_pool[slots].double()  # [keys, kv_heads, d]
    grouped = q.double().view(k.shape[1], -1, q.shape[-1])
    weights = (torch.einsum("hgd,nhd->hgn", grouped, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape)


@dataclass(frozen=True)
class Tree:
    """A random tree below a context, with queries for its rows."""

    pools: Pools
    q: Tensor  # [rows, heads, d]
    before: Tensor  # [context] slots
    own: Tensor  # [rows] slots
    masks: Tensor  # [rows]
    ways: list[list[int]]  # per row: the nodes on its path

    @property
    def segment(self) -> Segment:
        return Segment(len(self.own), self.before, self.own, self.masks)


def new_tree(
    shape: tuple[int, int, int],
    context: int,
    parents: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tree:
    """`parents` of the rows after the root."""
    kv_heads, group, dim = shape
    rows = len(parents) + 1
    pools = Pools(kv_heads, dim, dtype, context + rows, device)
    ways: list[list[int]] = [[0]]
    for row, parent in enumerate(parents, 1):
        ways.append([*ways[parent], row])
    words = [sum(1 << node for node in way) for way in ways]
    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    q = torch.randn((rows, kv_heads * group, dim), device=device).to(dtype)
    own = pools.order[context : context + rows]
    masks = torch.tensor(signed, device=device)
    return Tree(pools, q, pools.order[:context], own, masks, ways)


@st.composite
def parents_of_rows(draw: st.DrawFn, most: int) -> list[int]:
    rows = draw(st.integers(1, most))
    return [draw(st.integers(max(0, row - 6), row - 1)) for row in range(1, rows)]


@settings(max_examples=3, deadline=None)
@given(shape=SHAPES, context=CONTEXTS, parents=parents_of_rows(7))
def test_a_tree_reads_its_paths_and_nothing_else(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int, int],
    context: int,
    parents: list[int],
) -> None:
    tree = new_tree(shape, context, parents, dtype, device)
    ours = attend(backend, tree.q, tree.pools, tree.segment)
    assert torch.isfinite(ours).all()
    for row in {0, len(parents) // 2, len(parents)}:
        keys = torch.cat((tree.before, tree.own[tree.ways[row]]))
        expected = exact(tree.q[row], tree.pools.k, tree.pools.v, keys)
        assert (ours[row].double() - expected).abs().max() <= ROUNDING[dtype] * 4


@settings(max_examples=3, deadline=None)
@given(context=CONTEXTS, parents=parents_of_rows(64))
def test_a_row_has_its_path_without_gaps_behind_the_rest_of_the_context(
    device: torch.device, context: int, parents: list[int]
) -> None:
    tree = new_tree((1, 1, 16), context, parents, torch.float16, device)
    nothing = torch.zeros(len(tree.own), dtype=torch.int64, device=device)
    plan = new_plan(AttentionBatch(nothing, nothing, (tree.segment,)), tile_rows=16)
    rest = tree.before[context // CHUNK * CHUNK :]
    for row, way in enumerate(tree.ways):
        own = torch.cat((rest, tree.own[way]))
        gone = len(tree.own) - len(way)
        start = int(plan.rows[row, ROW.index("list")])
        listed = plan.keys[start : start + len(own) + gone]
        assert torch.equal(listed, torch.nn.functional.pad(own, (0, gone), value=-1).int())


def test_a_chain_of_64_rows_uses_every_bit_of_a_word(
    backend: TritonBackend, device: torch.device
) -> None:
    tree = new_tree((1, 1, 64), 5, list(range(63)), torch.float16, device)
    assert int(tree.masks[63]) == -1  # all 64 bits
    ours = attend(backend, tree.q, tree.pools, tree.segment)
    for row in (0, 31, 32, 62, 63):
        keys = torch.cat((tree.before, tree.own[: row + 1]))
        expected = exact(tree.q[row], tree.pools.k, tree.pools.v, keys)
        assert (ours[row].double() - expected).abs().max() <= 2**-8


@settings(max_examples=3, deadline=None)
@given(shape=SHAPES, length=st.integers(1, 320), cut=st.floats(0, 1), data=st.data())
def test_a_prefill_is_causal_and_may_be_cut_anywhere(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int, int],
    length: int,
    cut: float,
    data: st.DataObject,
) -> None:
    kv_heads, group, dim = shape
    pools = Pools(kv_heads, dim, dtype, length, device)
    slots, at = pools.order[:length], int(cut * length)
    q = torch.randn((length, kv_heads * group, dim), device=device).to(dtype)
    whole = attend(backend, q, pools, Segment(length, slots[:0], slots, None))
    row = data.draw(st.integers(0, length - 1))
    expected = exact(q[row], pools.k, pools.v, slots[: row + 1])
    assert (whole[row].double() - expected).abs().max() <= ROUNDING[dtype] * 4
    head = attend(backend, q[:at], pools, Segment(at, slots[:0], slots[:at], None))
    tail = attend(backend, q[at:], pools, Segment(length - at, slots[:at], slots[at:], None))
    assert torch.equal(torch.cat((head, tail)), whole)


@settings(max_examples=3, deadline=None)
@given(shape=SHAPES, context=CONTEXTS, parents=parents_of_rows(6), data=st.data())
def test_a_node_has_the_bits_of_a_plain_step_and_of_a_prefill_of_its_path(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int, int],
    context: int,
    parents: list[int],
    data: st.DataObject,
) -> None:
    case = new_tree(shape, context, parents, dtype, device)
    pools, q, before = case.pools, case.q, case.before
    tree = attend(backend, q, pools, case.segment)
    way = case.ways[data.draw(st.integers(0, len(parents)))]
    path = case.own[way]
    prefill = attend(backend, q[way], pools, Segment(len(way), before, path, None))
    assert torch.equal(prefill, tree[way])
    node, depth = way[-1], len(way) - 1
    committed, one = torch.cat((before, path[:depth])), torch.tensor([1], device=device)
    step = Segment(1, committed, path[depth:], one)
    assert torch.equal(attend(backend, q[node : node + 1], pools, step)[0], tree[node])


def test_segments_of_a_batch_do_not_touch_each_other(
    backend: TritonBackend, device: torch.device
) -> None:
    pools = Pools(1, 64, torch.bfloat16, 900, device)
    order, masks = pools.order, torch.tensor([1, 3, 5, 11, 21], device=device)
    segments = (
        Segment(5, order[:300], order[300:305], masks),
        Segment(40, order[400:470], order[470:510], None),
        Segment(1, order[:0], order[600:601], masks[:1]),
        Segment(1, order[600:899], order[899:900], masks[:1]),
    )
    q = torch.randn((47, 2, 64), device=device).bfloat16()
    together = attend(backend, q, pools, *segments)
    parts = zip(q.split([5, 40, 1, 1]), segments, strict=True)
    alone = [attend(backend, rows, pools, segment) for rows, segment in parts]
    assert torch.equal(together, torch.cat(alone))


def test_fp8_pools_are_read_with_their_scales(
    backend: TritonBackend, dtype: torch.dtype, device: torch.device
) -> None:
    tree = new_tree((2, 2, 128), 300, [0, 1], dtype, device)
    scales = Scales(torch.rand(2, device=device) + 0.5, torch.rand(2, device=device) + 0.5)
    codes = [
        pool.float().nan_to_num(448.0).to(torch.float8_e4m3fn)
        for pool in (tree.pools.k, tree.pools.v)
    ]
    nothing = torch.zeros(3, dtype=torch.int64, device=device)
    batch = AttentionBatch(nothing, nothing, (tree.segment,))
    ours = backend.tree_attention(tree.q, codes[0], codes[1], batch, scales)
    k, v = (
        c.double() * s.double()[:, None] for c, s in zip(codes, (scales.k, scales.v), strict=True)
    )
    for row in range(3):
        keys = torch.cat((tree.before, tree.own[tree.ways[row]]))
        expected = exact(tree.q[row], k, v, keys)
        assert (ours[row].double() - expected).abs().max() <= ROUNDING[dtype] * 8


def test_a_plan_is_made_once_for_all_layers(backend: TritonBackend, device: torch.device) -> None:
    tree = new_tree((1, 2, 64), 40, [0, 0], torch.float16, device)
    nothing = torch.zeros(3, dtype=torch.int64, device=device)
    batch = AttentionBatch(nothing, nothing, (tree.segment,))
    backend.tree_attention(tree.q, tree.pools.k, tree.pools.v, batch)
    plan = backend.plans.last[0]
    backend.tree_attention(tree.q, tree.pools.k, tree.pools.v, batch)
    assert backend.plans.last[0] is plan
    assert plan.batch is batch


def test_misfits_are_refused(backend: TritonBackend, device: torch.device) -> None:
    tree = new_tree((2, 2, 64), 10, [], torch.float16, device)
    pools = tree.pools
    with pytest.raises(ValueError, match=r"pool .* does not fit"):
        pools.k = pools.k.float()
        attend(backend, tree.q, pools, tree.segment)
    wide = torch.zeros((1, 2, 512), dtype=torch.float16, device=device)
    pool = torch.zeros((9, 2, 512), dtype=torch.float16, device=device)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="at most 256 values"):
        backend.tree_attention(wide, pool, pool, AttentionBatch(nothing, nothing, (tree.segment,)))
