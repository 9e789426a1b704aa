"""Norm, rotary embedding and gated activation."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.cpu.backend import CpuBackend

SIZES = st.integers(1, 300)
HALVES = st.integers(1, 130)
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-21}


def close(ours: Tensor, exact: Tensor, steps: int = 1) -> bool:
    """Within `steps` roundings of the result's type, relative to each value."""
    bound = steps * ROUNDING[ours.dtype] * exact.abs() + 1e-30
    return bool(((ours.double() - exact).abs() <= bound).all())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 60), d=SIZES, scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(backend: CpuBackend, dtype: torch.dtype, rows: int, d: int, scale: float) -> None:
    x, weight = (scale * torch.randn(rows, d)).to(dtype), torch.randn(d).to(dtype)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    ours = backend.rms_norm(x, weight, 1e-5)
    assert close(ours, exact, steps=2)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(backend.rms_norm(x[row : row + 1], weight, 1e-5)[0], ours[row])


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 60), heads=st.integers(1, 5), half=HALVES)
def test_rope_of_a_view(
    backend: CpuBackend, dtype: torch.dtype, rows: int, heads: int, half: int
) -> None:
    x = torch.randn(rows, heads + 2, 2 * half).to(dtype)[:, 1:-1]
    positions, frequencies = torch.randint(0, 10_000, (rows,)), torch.rand(half)
    cos, sin = backend.rotary_angles(positions, frequencies, 1.5)
    ours = backend.rope(x, cos, sin)
    assert torch.equal(ours, reference.rope(x, cos, sin))
    for row in (0, rows - 1):
        alone = backend.rotary_angles(positions[row : row + 1], frequencies, 1.5)
        assert torch.equal(backend.rope(x[row : row + 1], *alone)[0], ours[row])


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), half=HALVES)
def test_rotary_angles_are_within_rounding(backend: CpuBackend, rows: int, half: int) -> None:
    positions, frequencies = torch.randint(0, 100_000, (rows,)), torch.rand(half)
    angles = (positions.float()[:, None] * frequencies[None]).double()
    cos, sin = backend.rotary_angles(positions, frequencies, 1.0)
    torch.testing.assert_close(cos.double(), angles.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=2e-7, rtol=0)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 60), d=SIZES, scale=st.sampled_from([0.1, 1.0, 10.0, 80.0]))
def test_silu_mul(backend: CpuBackend, dtype: torch.dtype, rows: int, d: int, scale: float) -> None:
    gate_up = (scale * torch.randn(rows, 2 * d)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    ours = backend.silu_mul(gate_up)
    # Below e^-87 the sigmoid is no longer followed: what is left is under any rounding.
    assert close(ours[gate > -80], (torch.sigmoid(gate) * gate * up)[gate > -80], steps=2)
    assert (ours[gate <= -80].abs() < 1e-27).all()
    for row in (0, rows - 1):
        assert torch.equal(backend.silu_mul(gate_up[row : row + 1])[0], ours[row])
