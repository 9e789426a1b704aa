"""Kernels trust their pointers, so shapes, types and strides are checked in front of them."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST_VALUES = 2**31  # of a pool: offsets in it are int32


def expect(holds: bool, name: str, given: Tensor) -> None:
    """Raises ValueError that names the operand."""
    if not holds:
        shape = list(given.shape)
        raise ValueError(f"{name} {shape} of {given.dtype} does not fit the other operands")


def expect_pool(pool: Tensor, like: Tensor, kv_heads: int, dtype: torch.dtype) -> None:
    """A pool [slots, kv_heads, d] in one piece, for heads like those of `like` [..., d]."""
    fits = pool.dtype == dtype and pool.is_contiguous() and pool.numel() < MOST_VALUES
    expect(fits and pool.shape[1:] == (kv_heads, like.shape[-1]), "pool", pool)


def expect_scales(scale: Tensor, kv_heads: int) -> None:
    expect(scale.shape == (kv_heads,) and scale.dtype == torch.float32, "scale", scale)


def expect_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """cos, sin [rows, d / 2] in fp32 for x [rows, heads, d]."""
    for angles in (cos, sin):
        fits = angles.shape == (len(x), x.shape[-1] // 2) and angles.dtype == torch.float32
        expect(fits and x.shape[-1] % 2 == 0, "angles", angles)


def heads_together(x: Tensor) -> Tensor:
    """x [rows, heads, d] with a row in one piece, as in a slice of fused projections."""
    d = x.shape[2]
    in_place = x.stride(2) == 1 and x.stride(1) == d and x.stride(0) % d == 0
    return x if in_place else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """x [..., d] as [rows, heads, d] (one head where there are none), copied only where it must."""
    d = x.shape[-1]
    in_place = x.stride(-1) == 1 and all(stride % d == 0 for stride in x.stride()[:-1])
    if not in_place or x.dim() not in (2, 3):
        x = x.contiguous().view(-1, d)
    return x[:, None] if x.dim() == 2 else x
