"""Weights in int8: quantized by the rule, multiplied right, and each row's bits its own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.cpu.backend import CpuBackend
from kernels.packed import PackedWeight

SIZES = st.integers(1, 150)
ROWS = st.integers(1, 300)


def random(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Outputs of quite different sizes, as in a model."""
    return (torch.randn(outputs, inputs) * torch.randn(outputs, 1).exp()).to(dtype)


def integers(packed: PackedWeight) -> Tensor:
    """[outputs, inputs] int8, in the panels' order."""
    rows = packed.panels.squeeze(-1).transpose(1, 2).reshape(-1, packed.inputs)
    assert not rows[packed.outputs :].any()
    return rows[: packed.outputs]


def scales(packed: PackedWeight) -> Tensor:
    assert packed.scales is not None
    return packed.scales


@settings(max_examples=20, deadline=None)
@given(inputs=SIZES, outputs=SIZES, size=st.sampled_from((1e-30, 0.02, 1.0, 1e30)))
def test_the_quantization_is_the_rule(
    backend: CpuBackend, dtype: torch.dtype, inputs: int, outputs: int, size: float
) -> None:
    weight = (torch.randn(outputs, inputs) * size).to(dtype)
    weight[0] = 0
    packed = backend.pack(weight, quantize=True)
    wide = weight.float().numpy()
    expected = np.abs(wide).max(1) / np.float32(127)
    quotients = np.divide(wide, expected[:, None], where=wide != 0, out=np.zeros_like(wide))
    assert packed.dtype == torch.int8
    assert packed.shape == weight.shape
    assert np.array_equal(scales(packed).numpy(), expected)
    assert np.array_equal(integers(packed).numpy(), np.rint(quotients))
    assert torch.equal(packed.dense(), integers(packed) * scales(packed)[:, None])
    loss = (packed.dense().double() - weight.double()).abs()
    assert (loss <= 0.5001 * scales(packed)[:, None].double()).all()


def test_halves_go_to_the_even_neighbour(backend: CpuBackend, dtype: torch.dtype) -> None:
    weight = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]], dtype=dtype)
    packed = backend.pack(weight, quantize=True)
    assert scales(packed).tolist() == [1.0]
    assert integers(packed).tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def test_the_smallest_numbers_keep_within_the_range(backend: CpuBackend) -> None:
    weight = torch.tensor([[190 * 2.0**-149, -190 * 2.0**-149], [2.0**-149, 0]])
    packed = backend.pack(weight, quantize=True)  # their scales are 1 and 0 times 2^-149
    assert integers(packed).tolist() == [[127, -127], [0, 0]]


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_weight_breaks_its_output_alone(
    backend: CpuBackend, dtype: torch.dtype, fault: float
) -> None:
    weight = random(40, 9, dtype)
    weight[3, 5] = fault
    out = backend.linear(
        torch.randn(2, 9).to(dtype), backend.pack(weight, quantize=True), None, None, False
    )
    assert torch.equal(out.isnan().all(0).nonzero().flatten(), torch.tensor([3]))
    assert out.isnan().sum() == 2


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 30), inputs=SIZES, outputs=SIZES, biased=st.booleans())
def test_it_agrees_with_float64(
    backend: CpuBackend, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    x, packed = (
        torch.randn(rows, inputs).to(dtype),
        backend.pack(random(outputs, inputs, dtype), quantize=True),
    )
    bias = torch.randn(outputs).to(dtype) if biased else None
    matrix = integers(packed).double() * scales(packed).double()[:, None]
    extra = 0 if bias is None else bias.double()
    expected = x.double() @ matrix.T + extra
    magnitude = x.double().abs() @ matrix.abs().T + abs(extra)
    wide = backend.linear(x, packed, bias, None, True)
    assert wide.dtype == torch.float32
    assert ((wide - expected).abs() <= 2**-21 * magnitude).all()
    assert torch.equal(backend.linear(x, packed, bias, None, False), wide.to(dtype))


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, inputs=SIZES, outputs=SIZES, first=st.floats(0, 1), some=st.floats(0, 1))
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    backend: CpuBackend,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    first: float,
    some: float,
) -> None:
    x, packed = (
        torch.randn(rows, inputs).to(dtype),
        backend.pack(random(outputs, inputs, dtype), quantize=True),
    )
    start = int(first * (rows - 1))
    stop = start + 1 + int(some * (rows - start - 1))
    whole = backend.linear(x, packed, None, None, True)
    for end in (start + 1, stop):
        part = backend.linear(x[start:end], packed, None, None, True)
        assert torch.equal(part, whole[start:end])


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), outputs=SIZES)
def test_a_residual_is_added_to_the_rounded_result(
    backend: CpuBackend, dtype: torch.dtype, rows: int, outputs: int
) -> None:
    x, packed = (
        torch.randn(rows, 63).to(dtype),
        backend.pack(random(outputs, 63, dtype), quantize=True),
    )
    residual = torch.randn(rows, outputs).to(dtype)
    plain = backend.linear(x, packed, None, None, False)
    assert torch.equal(backend.linear(x, packed, None, residual, False), residual + plain)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), inner=st.integers(1, 80), inputs=SIZES, biased=st.booleans())
def test_a_gated_linear_is_its_parts_bit_for_bit(
    backend: CpuBackend, dtype: torch.dtype, rows: int, inner: int, inputs: int, biased: bool
) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), random(2 * inner, inputs, dtype)
    bias = torch.randn(2 * inner).to(dtype) if biased else None
    packed, plain = backend.pack_gated(weight, quantize=True), backend.pack(weight, quantize=True)
    assert packed.gated == (inner % 16 == 0)
    assert torch.equal(packed.dense(), plain.dense())
    parts = backend.silu_mul(backend.linear(x, plain, bias, None, False))
    assert torch.equal(backend.gated_linear(x, packed, bias), parts)


def test_the_number_of_threads_does_not_show(backend: CpuBackend, dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 500).to(dtype), random(700, 500, dtype)
    results: list[Tensor] = []
    for threads in (1, 2, 5):
        backend.set_threads(threads)
        packed = backend.pack(weight, quantize=True)
        results.append(backend.linear(x, packed, None, None, True))
    backend.set_threads(2)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_weight_that_cannot_be_int8_is_refused(chosen: CpuBackend) -> None:
    with pytest.raises(ValueError, match=r"no int8 for torch\.float16"):
        ops.pack(torch.randn(4, 4).half(), quantize=True)
    with ops.use_backend(None), pytest.raises(ValueError, match="torch"):
        ops.pack(torch.randn(4, 4), quantize=True)
    packed = ops.pack(torch.randn(8, 16), quantize=True)
    with pytest.raises(ValueError, match=r"x \[2, 15\]"):
        ops.linear(torch.randn(2, 15), packed)


def test_what_is_too_small_for_a_number_is_so_in_a_gated_linear_and_in_its_parts(
    backend: CpuBackend, dtype: torch.dtype
) -> None:
    gates = -torch.arange(80.0, 112.0, 0.5)[:, None] / 32
    weight = torch.cat((gates, torch.full_like(gates, 1e-4))).expand(-1, 32).to(dtype)
    packed, plain = backend.pack_gated(weight, quantize=True), backend.pack(weight, quantize=True)
    x = torch.ones(3, 32).to(dtype)
    parts = backend.silu_mul(backend.linear(x, plain, None, None, False))
    assert torch.equal(backend.gated_linear(x, packed, None), parts)
