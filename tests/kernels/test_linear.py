"""Rows times packed weights: right, and each row's bits its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.cpu.backend import CpuBackend

SIZES = st.integers(1, 150)
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-23}


def sum_of_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result in float64, and the size of what is added up, which errors are relative to."""
    wide, matrix = x.double(), weight.double()
    extra = 0 if bias is None else bias.double()
    return wide @ matrix.T + extra, wide.abs() @ matrix.abs().T + abs(extra)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 30), inputs=SIZES, outputs=SIZES, biased=st.booleans())
def test_it_agrees_with_float64(
    backend: CpuBackend, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    expected, magnitude = sum_of_products(x, weight, bias)
    packed = backend.pack(weight)
    wide = backend.linear(x, packed, bias, None, True)
    assert wide.dtype == torch.float32
    assert ((wide - expected).abs() <= 2**-21 * magnitude).all()
    narrow = backend.linear(x, packed, bias, None, False)
    assert torch.equal(narrow, wide.to(dtype))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 300),
    inputs=SIZES,
    outputs=SIZES,
    first=st.floats(0, 1),
    some=st.floats(0, 1),
)
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
        backend.pack(torch.randn(outputs, inputs).to(dtype)),
    )
    start = int(first * (rows - 1))
    stop = start + 1 + int(some * (rows - start - 1))
    whole = backend.linear(x, packed, None, None, True)
    assert torch.equal(backend.linear(x[start:stop], packed, None, None, True), whole[start:stop])
    assert torch.equal(
        backend.linear(x[start : start + 1], packed, None, None, True)[0], whole[start]
    )


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), outputs=SIZES)
def test_a_residual_is_added_to_the_rounded_result(
    backend: CpuBackend, dtype: torch.dtype, rows: int, outputs: int
) -> None:
    x, packed = torch.randn(rows, 64).to(dtype), backend.pack(torch.randn(outputs, 64).to(dtype))
    residual = torch.randn(rows, outputs).to(dtype)
    plain = backend.linear(x, packed, None, None, False)
    assert torch.equal(backend.linear(x, packed, None, residual, False), residual + plain)


@settings(max_examples=20, deadline=None)
@given(inputs=SIZES, outputs=SIZES)
def test_a_packed_weight_is_the_weight(
    backend: CpuBackend, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = backend.pack(weight)
    assert packed.shape == weight.shape
    assert torch.equal(packed.dense(), weight)


def test_the_number_of_threads_does_not_show(backend: CpuBackend, dtype: torch.dtype) -> None:
    x, packed = torch.randn(37, 500).to(dtype), backend.pack(torch.randn(700, 500).to(dtype))
    results: list[Tensor] = []
    for threads in (1, 2, 5):
        backend.set_threads(threads)
        results.append(backend.linear(x, packed, None, None, True))
    backend.set_threads(2)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_misfit_is_refused(backend: CpuBackend) -> None:
    packed = backend.pack(torch.randn(8, 16))
    with pytest.raises(ValueError, match=r"x \[2, 15\]"):
        backend.linear(torch.randn(2, 15), packed, None, None, False)
    with pytest.raises(ValueError, match="bfloat16"):
        backend.linear(torch.randn(2, 16).bfloat16(), packed, None, None, False)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), inner=st.integers(1, 80), inputs=SIZES, biased=st.booleans())
def test_a_gated_linear_is_its_parts_bit_for_bit(
    backend: CpuBackend, dtype: torch.dtype, rows: int, inner: int, inputs: int, biased: bool
) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(2 * inner, inputs).to(dtype)
    bias = torch.randn(2 * inner).to(dtype) if biased else None
    packed = backend.pack_gated(weight)
    assert packed.gated == (inner % 16 == 0)
    assert torch.equal(packed.dense(), weight)
    parts = backend.silu_mul(backend.linear(x, backend.pack(weight), bias, None, False))
    assert torch.equal(backend.gated_linear(x, packed, bias), parts)


def test_gates_and_ups_are_no_plain_weight(backend: CpuBackend, dtype: torch.dtype) -> None:
    packed = backend.pack_gated(torch.randn(32, 8).to(dtype))
    with pytest.raises(ValueError, match="weight"):
        backend.linear(torch.randn(1, 8).to(dtype), packed, None, None, False)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), inputs=SIZES, outputs=SIZES, tiny=st.booleans())
def test_fp32_fmas_have_the_bits_of_bf16_dot_products(
    rows: int, inputs: int, outputs: int, tiny: bool
) -> None:
    """So that the faster of the two may serve; denormal numbers included."""
    names = {each.instruction_set.name: each for each in ops.native_backends()}
    if not {"avx512_bf16", "avx512"} <= names.keys():
        pytest.skip("no bf16 dot products on this processor")
    scale = 2.0**-70 if tiny else 1.0
    x = (torch.randn(rows, inputs) * scale).bfloat16()
    weight = (torch.randn(outputs, inputs) * scale).bfloat16()
    one, other = (
        names[name].linear(x, names[name].pack(weight), None, None, True)
        for name in ("avx512_bf16", "avx512")
    )
    assert torch.equal(one, other)
