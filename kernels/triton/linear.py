"""Rows times a weight, exact: the sum of an output runs over the inputs in steps of one size, in
the same splits, with the same matrix instruction, however many rows there are."""

# Triton compiles these functions: they are Python by their syntax alone.
# pyright: basic, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def finish(value, at, output, inside, bias, residual, rounded: tl.constexpr):
    """Bias and residual; the result is rounded before the residual is added, as without one."""
    if bias is not None:
        value += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value = value.to(rounded).to(tl.float32)
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor,
    sums: tl.tensor, rows,
    outputs: tl.constexpr, inputs: tl.constexpr, splits: tl.constexpr,
    block_rows: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """A tile of x [rows, inputs] @ weight [outputs, inputs]^T, over one split of the inputs. Tiles
    of the same outputs are neighbours, so that they share the weight in the L2 cache."""
    row_tiles = tl.cdiv(rows, block_rows)
    output_tiles: tl.constexpr = (outputs + block_outputs - 1) // block_outputs
    row_tile, rest = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    split, output_tile = rest // output_tiles, rest % output_tiles
    row = row_tile * block_rows + tl.arange(0, block_rows)
    output = output_tile * block_outputs + tl.arange(0, block_outputs)
    of_x = x + row.to(tl.int64)[:, None] * inputs
    of_weight = weight + output.to(tl.int64)[:, None] * inputs
    live, there = (row < rows)[:, None], (output < outputs)[:, None]
    each: tl.constexpr = inputs // splits
    acc = tl.zeros([block_rows, block_outputs], tl.float32)
    for begin in range(0, each, block_inputs):
        at = split * each + begin + tl.arange(0, block_inputs)
        if inputs % block_inputs == 0:
            left = tl.load(of_x + at[None, :], mask=live, other=0.0)
            right = tl.load(of_weight + at[None, :], mask=there, other=0.0)
        else:
            inside = (at < inputs)[None, :]
            left = tl.load(of_x + at[None, :], mask=live & inside, other=0.0)
            right = tl.load(of_weight + at[None, :], mask=there & inside, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc)
    inside = live & (output < outputs)[None, :]
    to = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if splits == 1:
        rounded: tl.constexpr = x.dtype.element_ty
        value = finish(acc, to, output[None, :], inside, bias, residual, rounded)
        tl.store(out + to, value, mask=inside)
    else:
        tl.store(sums + split.to(tl.int64) * rows * outputs + to, acc, mask=inside)


@triton.jit(do_not_specialize=["count"])
def add_splits(
    sums: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor, count,
    outputs: tl.constexpr, splits: tl.constexpr, block: tl.constexpr, rounded: tl.constexpr,
):  # fmt: skip
    """Elements of the result: the first split, plus the second, and so on."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(sums + at, mask=inside, other=0.0)
    for split in tl.static_range(1, splits):
        value += tl.load(sums + split * count + at, mask=inside, other=0.0)
    value = finish(value, at, at % outputs, inside, bias, residual, rounded)
    tl.store(out + at, value, mask=inside)
