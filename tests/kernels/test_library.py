"""The operations registered with torch: they are what torch expects, and it can compile them."""

import pytest
import torch
from torch.library import opcheck

from kernels import library, ops
from kernels.batch import AttentionBatch, Segment

ROWS, HIDDEN, HEADS, KV_HEADS, DIM, SLOTS = 3, 32, 4, 2, 8, 16


def pools(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, SLOTS, KV_HEADS, DIM).to(dtype)
    return k.clone(), v.clone()


CALLS = {
    "linear": lambda d: (
        library.linear,
        (torch.randn(ROWS, HIDDEN).to(d), torch.randn(8, HIDDEN).to(d), None, None, True),
    ),
    "rms_norm": lambda d: (
        library.rms_norm,
        (torch.randn(ROWS, HIDDEN).to(d), torch.randn(HIDDEN).to(d), 1e-5),
    ),
    "silu_mul": lambda d: (library.silu_mul, (torch.randn(ROWS, HIDDEN).to(d),)),
    "rope_and_write": lambda d: (
        library.rope_and_write,
        (
            torch.randn(ROWS, HEADS, DIM).to(d),
            torch.randn(ROWS, KV_HEADS, DIM).to(d),
            torch.randn(ROWS, KV_HEADS, DIM).to(d),
            *(torch.randn(ROWS, DIM // 2) for _ in range(2)),
            *pools(d),
            torch.tensor([4, 0, 9]),
        ),
    ),
    "tree_attention": lambda d: (
        library.tree_attention,
        (
            torch.randn(ROWS, HEADS, DIM).to(d),
            *pools(d),
            torch.tensor([4, 0, 9]),
            torch.tensor([2, 3, 3]),
            [ROWS],
            [torch.tensor([1, 2])],
            [torch.tensor([4, 0, 9])],
            [torch.tensor([1, 3, 5])],
        ),
    ),
    "sample": lambda d: (
        library.sample,
        (torch.randn(ROWS, 40), 0.8, 5, 0.9, 0.0, torch.rand(ROWS, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_torch_expects_of_an_operation(name: str, dtype: torch.dtype) -> None:
    operation, arguments = CALLS[name](dtype)
    opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))


def test_attention_is_that_of_the_batch() -> None:
    operation, arguments = CALLS["tree_attention"](torch.float32)
    q, k, v, slots, positions, (rows,), (context,), (tail,), (mask,) = arguments
    batch = AttentionBatch(slots, positions, (Segment(rows, context, tail, mask),))
    assert torch.equal(operation(*arguments), ops.tree_attention(q, k, v, batch))
    causal = AttentionBatch(slots, positions, (Segment(rows, context, tail, None),))
    empty = torch.empty(0, dtype=torch.int64)
    assert torch.equal(operation(*arguments[:-1], [empty]), ops.tree_attention(q, k, v, causal))


def test_a_graph_of_them_is_traced_whole() -> None:
    def mlp(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        normed = torch.ops.coppice.rms_norm(x, norm, 1e-5)
        return torch.ops.coppice.silu_mul(
            torch.ops.coppice.linear(normed, weight, None, None, False)
        )

    x, weight, norm = torch.randn(ROWS, HIDDEN), torch.randn(16, HIDDEN), torch.randn(HIDDEN)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    expected = ops.silu_mul(ops.linear(ops.rms_norm(x, norm, 1e-5), weight))
    assert torch.equal(compiled(x, weight, norm), expected)
