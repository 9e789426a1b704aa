"""Norm, rotary embedding, writes into slots and gated activation."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.triton.backend import Scales, TritonBackend

SIZES = st.sampled_from([1, 7, 64, 100, 576])
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def close(ours: Tensor, exact: Tensor, steps: int = 1) -> bool:
    """Within `steps` roundings of the result's type, relative to each value."""
    bound = steps * ROUNDING[ours.dtype] * exact.abs() + 2e-6
    return bool(((ours.double() - exact).abs() <= bound).all())


def test_what_nothing_writes_is_nan(device: torch.device) -> None:
    assert torch.empty(5, device=device).isnan().all()


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 6), d=SIZES, scale=st.sampled_from([1e-2, 1.0, 1e2]))
def test_rms_norm(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    d: int,
    scale: float,
) -> None:
    x = (scale * torch.randn((rows, d), device=device)).to(dtype)
    weight, residual = torch.randn(d, device=device).to(dtype), torch.randn_like(x)
    ours = backend.rms_norm(x, weight, 1e-5)
    assert close(ours, exact_norm(x, weight), steps=2)
    assert torch.equal(backend.rms_norm(x[-1:], weight, 1e-5)[0], ours[-1])
    added, normed = backend.add_and_norm(x, residual, weight, 1e-5)
    assert torch.equal(added, x + residual)
    assert torch.equal(normed, backend.rms_norm(added, weight, 1e-5))


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()


def test_heads_of_fused_projections_are_normed_where_they_lie(
    backend: TritonBackend, dtype: torch.dtype, device: torch.device
) -> None:
    fused = torch.randn((3, 10 * 64), device=device).to(dtype)
    heads, weight = fused[:, 128:512].view(3, 6, 64), torch.randn(64, device=device).to(dtype)
    assert close(backend.rms_norm(heads, weight, 1e-5), exact_norm(heads, weight), steps=2)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 4), heads=st.integers(1, 3), half=st.sampled_from([1, 20, 48, 64]))
def test_rope_of_a_view(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    heads: int,
    half: int,
) -> None:
    x = torch.randn((rows, heads + 2, 2 * half), device=device).to(dtype)[:, 1:-1]
    cos, sin = angles_of(rows, half, device)
    ours = backend.rope(x, cos, sin)
    assert close(ours, exact_rope(x, cos, sin), steps=2)
    assert torch.equal(backend.rope(x[-1:], cos[-1:], sin[-1:])[0], ours[-1])


def angles_of(rows: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 10_000, (rows,), device=device)
    return reference.rotary_angles(positions, torch.rand(half, device=device), 1.5)


def exact_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_rope_and_write_is_rope_and_writes(
    backend: TritonBackend, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = parts_of_fused(dtype, device)
    cos, sin = angles_of(3, 24, device)
    k_pool, v_pool = (torch.empty((8, 2, 48), dtype=dtype, device=device) for _ in range(2))
    slots = torch.tensor([7, 0, 3], device=device)
    rotated = backend.rope_and_write(q, k, v, (cos, sin), (k_pool, v_pool), slots)
    assert torch.equal(rotated, backend.rope(q, cos, sin))
    assert torch.equal(k_pool[slots], backend.rope(k, cos, sin))
    assert torch.equal(v_pool[slots], v)
    others = torch.tensor([1, 2, 4, 5, 6], device=device)
    assert k_pool[others].isnan().all()
    assert v_pool[others].isnan().all()


def parts_of_fused(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    fused = torch.randn((3, 9 * 48), device=device).to(dtype)
    return [part.view(3, -1, 48) for part in fused.split((5 * 48, 96, 96), -1)]


def test_fp8_writes_are_torchs_rounding_of_what_is_scaled(
    backend: TritonBackend, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = parts_of_fused(dtype, device)
    angles = angles_of(3, 24, device)
    pools = [torch.zeros((8, 2, 48), device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = Scales(torch.tensor([0.25, 0.01], device=device), torch.ones(2, device=device))
    slots = torch.tensor([7, 0, 3], device=device)
    backend.rope_and_write(q, k, v, angles, (pools[0], pools[1]), slots, scales)
    rotated = backend.rope(k, *angles).float()
    expected = (rotated / scales.k[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = [pool.view(torch.uint8)[slots] for pool in pools]
    assert torch.equal(codes[0], expected.view(torch.uint8))
    assert torch.equal(codes[1], v.float().to(torch.float8_e4m3fn).view(torch.uint8))


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 4), d=SIZES, scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_silu_mul(
    backend: TritonBackend,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    d: int,
    scale: float,
) -> None:
    gate_up = (scale * torch.randn((rows, 2 * d), device=device)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    ours = backend.silu_mul(gate_up)
    assert close(ours, torch.sigmoid(gate) * gate * up, steps=2)
    assert torch.equal(backend.silu_mul(gate_up[-1:])[0], ours[-1])
