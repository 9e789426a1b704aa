"""Rows times a weight: right, and each row's bits its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import linear_tile

# Outputs and inputs; the last two are split.
SHAPES = st.sampled_from([(1, 1), (70, 33), (64, 64), (100, 130), (65, 1024), (130, 2048)])


@settings(max_examples=8, deadline=None)
@given(rows=st.sampled_from([1, 3, 64, 65]), shape=SHAPES, biased=st.booleans())
def test_it_agrees_with_float64(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    shape: tuple[int, int],
    biased: bool,
) -> None:
    outputs, inputs = shape
    x = torch.randn((rows, inputs), device=device).to(dtype)
    weight = torch.randn(shape, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    residual = torch.randn((rows, outputs), device=device).to(dtype)
    wide = backend.linear(x, weight, bias, wide=True)
    extra = 0 if bias is None else bias.double()
    exact = x.double() @ weight.double().T + extra
    size = x.double().abs() @ weight.double().abs().T + abs(extra)
    assert wide.dtype == torch.float32
    assert ((wide - exact).abs() <= 2**-20 * size).all()
    narrow = backend.linear(x, weight, bias)
    assert torch.equal(narrow, wide.to(dtype))
    assert torch.equal(backend.linear(x, weight, bias, residual), residual + narrow)


@settings(max_examples=5, deadline=None)
@given(rows=st.integers(2, 150), shape=SHAPES, data=st.data())
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    shape: tuple[int, int],
    data: st.DataObject,
) -> None:
    x = torch.randn((rows, shape[1]), device=device).to(dtype)
    weight = torch.randn(shape, device=device).to(dtype)
    whole = backend.linear(x, weight, wide=True)
    row = data.draw(st.integers(0, rows - 1))
    assert torch.equal(backend.linear(x[row : row + 1], weight, wide=True)[0], whole[row])
    assert torch.equal(backend.linear(x[row:], weight, wide=True), whole[row:])


def test_narrow_weights_are_split_and_wide_ones_are_not() -> None:
    assert linear_tile(4096, 4096, 90).splits == 4
    assert linear_tile(128256, 4096, 90).splits == 1
    assert linear_tile(65, 1024, 90).splits == 2
    for outputs, inputs in ((4096, 14336), (576, 1536), (100, 130), (64, 1000)):
        tile = linear_tile(outputs, inputs, 90)
        assert tile.splits == 1 or inputs % (tile.splits * tile.inputs) == 0


def test_fast_mode_is_torchs_product(device: torch.device) -> None:
    x, weight = torch.randn((3, 32), device=device), torch.randn((16, 32), device=device)
    fast = TritonBackend(80, exact=False)
    assert torch.equal(fast.linear(x, weight), reference.linear(x, weight))


def test_a_misfit_is_refused(backend: TritonBackend, device: torch.device) -> None:
    weight = torch.randn((8, 16), device=device).half()
    with pytest.raises(ValueError, match=r"x \[2, 15\]"):
        backend.linear(torch.randn((2, 15), device=device).half(), weight)
    with pytest.raises(ValueError, match=r"residual \[2, 7\]"):
        x, residual = torch.zeros((2, 16), device=device).half(), torch.zeros((2, 7), device=device)
        backend.linear(x, weight, residual=residual.half())
