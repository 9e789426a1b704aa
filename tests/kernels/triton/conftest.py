"""The Triton kernels on a GPU, or in Triton's interpreter with its bf16 mended."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.triton.backend import TritonBackend

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def _wide(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast_and_round(self: InterpreterBuilder, source: TensorHandle, to: Any) -> TensorHandle:
    if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
        return TensorHandle(_rounded(source.data), tl.bfloat16)
    return _cast(self, source, to)


def _dot_of_values(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, add: TensorHandle, *rest: Any
) -> TensorHandle:
    if _wide(a).dtype.primitive_bitwidth == 8:
        return _dot(self, a, b, add, *rest)
    exact = np.matmul(_wide(a).data.astype(np.float64), _wide(b).data.astype(np.float64))
    return TensorHandle(exact.astype(add.data.dtype) + add.data, add.dtype.scalar)


# The interpreter of Triton 3.7 cuts fp32 to bf16 where a GPU rounds, and multiplies matrices of
# bf16 as the integers that it keeps them in. The BLAS below it adds a row's products in an order
# that depends on the row's place in the tile, which no GPU does; sums in fp64 leave no trace of it.
InterpreterBuilder.cast_impl = _cast_and_round
InterpreterBuilder.create_dot = _dot_of_values


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def backend(device: torch.device) -> TritonBackend:
    """Session-wide, so that hypothesis may use it."""
    if device.type == "cpu":
        return TritonBackend(capability=80)
    major, minor = torch.cuda.get_device_capability()
    return TritonBackend(10 * major + minor)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"], scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What nothing writes is NaN: torch fills new tensors with it in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
