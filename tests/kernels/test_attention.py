"""Attention over slots: right, blind to what it may not read, and each row's bits its own."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import AttentionBatch, Segment
from kernels.cpu.backend import CpuBackend

SLOTS = 600
CONTEXTS = st.one_of(
    st.integers(0, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192]), st.integers(0, 400)
)
SHAPES = st.sampled_from([(1, 1, 64), (3, 3, 64), (2, 1, 8), (2, 4, 96), (1, 2, 128), (1, 5, 40)])
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-19}


class Pools:
    """Random K and V; the slots beyond the first `used` of `order` are NaN."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype, used: int) -> None:
        self.order = torch.randperm(SLOTS)
        self.k = torch.randn(SLOTS, kv_heads, dim).to(dtype)
        self.v = torch.randn(SLOTS, kv_heads, dim).to(dtype)
        self.k[self.order[used:]] = torch.nan
        self.v[self.order[used:]] = torch.nan


def attend(backend: CpuBackend, q: Tensor, pools: Pools, *segments: Segment) -> Tensor:
    nothing = torch.zeros(len(q), dtype=torch.int64)
    batch = AttentionBatch(nothing, nothing, segments)
    return backend.tree_attention(q, pools.k, pools.v, batch)


def exact(q: Tensor, pools: Pools, slots: Tensor) -> Tensor:
    """One row's attention over its slots, in float64: q [heads, d] -> [heads, d]."""
    k, v = pools.k[slots].double(), pools.v[slots].double()  # [keys, kv_heads, d]
    kv_heads = k.shape[1]
    grouped = q.double().view(kv_heads, -1, q.shape[-1])
    weights = (torch.einsum("hgd,nhd->hgn", grouped, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape)


def paths(parents: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Ancestry words [rows] and the paths from the root, for parents of the rows after it."""
    ways: list[list[int]] = [[0]]
    for row, parent in enumerate(parents, 1):
        ways.append([*ways[parent], row])
    words = [sum(1 << node for node in way) for way in ways]
    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    return torch.tensor(signed), ways


def tree_of(rows: int, data: st.DataObject) -> tuple[Tensor, list[list[int]]]:
    return paths([data.draw(st.integers(max(0, row - 6), row - 1)) for row in range(1, rows)])


@dataclass(frozen=True)
class Drawn:
    """A tree below a context, with queries for its rows."""

    pools: Pools
    q: Tensor  # [rows, heads, d]
    before: Tensor  # [context] slots
    own: Tensor  # [rows] slots
    masks: Tensor  # [rows]
    ways: list[list[int]]  # per row: the nodes on its path

    @property
    def segment(self) -> Segment:
        return Segment(len(self.own), self.before, self.own, self.masks)


def drawn(
    shape: tuple[int, int, int],
    context: int,
    rows: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> Drawn:
    kv_heads, group, dim = shape
    pools = Pools(kv_heads, dim, dtype, context + rows)
    masks, ways = tree_of(rows, data)
    q = torch.randn(rows, kv_heads * group, dim).to(dtype)
    own = pools.order[context : context + rows]
    return Drawn(pools, q, pools.order[:context], own, masks, ways)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, context=CONTEXTS, rows=st.integers(1, 64), data=st.data())
def test_a_tree_reads_its_paths_and_nothing_else(
    backend: CpuBackend,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    context: int,
    rows: int,
    data: st.DataObject,
) -> None:
    tree = drawn(shape, context, rows, dtype, data)
    ours = attend(backend, tree.q, tree.pools, tree.segment)
    assert torch.isfinite(ours).all()
    for row in {0, rows // 2, rows - 1}:
        keys = torch.cat((tree.before, tree.own[tree.ways[row]]))
        expected = exact(tree.q[row], tree.pools, keys)
        assert (ours[row].double() - expected).abs().max() <= ROUNDING[dtype] * 4


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, context=CONTEXTS, rows=st.integers(1, 64), data=st.data())
def test_a_node_has_the_bits_of_a_plain_step_and_of_a_prefill_of_its_path(
    backend: CpuBackend,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    context: int,
    rows: int,
    data: st.DataObject,
) -> None:
    case = drawn(shape, context, rows, dtype, data)
    pools, q, before, own = case.pools, case.q, case.before, case.own
    tree = attend(backend, q, pools, case.segment)
    way = case.ways[data.draw(st.integers(0, rows - 1))]
    path = own[way]
    prefill = attend(backend, q[way], pools, Segment(len(way), before, path, None))
    assert torch.equal(prefill, tree[way])
    for depth, node in enumerate(way):
        committed = torch.cat((before, path[:depth]))
        one = Segment(1, committed, path[depth : depth + 1], torch.tensor([1]))
        assert torch.equal(attend(backend, q[node : node + 1], pools, one)[0], tree[node])


@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, length=st.integers(2, 300), cut=st.floats(0, 1), data=st.data())
def test_a_prefill_cut_in_two_has_the_same_bits(
    backend: CpuBackend,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    length: int,
    cut: float,
    data: st.DataObject,
) -> None:
    kv_heads, group, dim = shape
    pools = Pools(kv_heads, dim, dtype, length)
    slots, at = pools.order[:length], 1 + int(cut * (length - 2))
    q = torch.randn(length, kv_heads * group, dim).to(dtype)
    whole = attend(backend, q, pools, Segment(length, slots[:0], slots, None))
    head = attend(backend, q[:at], pools, Segment(at, slots[:0], slots[:at], None))
    tail = attend(backend, q[at:], pools, Segment(length - at, slots[:at], slots[at:], None))
    assert torch.equal(torch.cat((head, tail)), whole)
    row = data.draw(st.integers(0, length - 1))
    expected = exact(q[row], pools, slots[: row + 1])
    assert (whole[row].double() - expected).abs().max() <= ROUNDING[dtype] * 4


def test_a_row_of_nan_spoils_no_earlier_row(backend: CpuBackend, dtype: torch.dtype) -> None:
    pools = Pools(2, 64, dtype, 99)
    slots, q = pools.order[:100], torch.randn(100, 4, 64).to(dtype)
    ours = attend(backend, q, pools, Segment(100, slots[:0], slots, None))
    assert torch.isfinite(ours[:99]).all()
    assert torch.isnan(ours[99]).all()


def test_segments_of_a_batch_do_not_touch_each_other(
    backend: CpuBackend, dtype: torch.dtype
) -> None:
    pools = Pools(2, 64, dtype, 500)
    order = pools.order
    masks, _ = paths([0, 0, 1, 2])
    segments = (
        Segment(5, order[:130], order[130:135], masks),
        Segment(90, order[200:270], order[270:360], None),
        Segment(1, order[:0], order[400:401], torch.tensor([1])),
    )
    q = torch.randn(96, 6, 64).to(dtype)
    together = attend(backend, q, pools, *segments)
    parts = zip(q.split([5, 90, 1]), segments, strict=True)
    alone = [attend(backend, rows, pools, segment) for rows, segment in parts]
    assert torch.equal(together, torch.cat(alone))
