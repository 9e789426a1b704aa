"""Nothing that decides which binary runs depends on the number of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.batch import AttentionBatch, Segment
from kernels.triton.backend import TritonBackend
from kernels.triton.launch import Launch

META = torch.device("meta")
ROWS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 256, 300)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def linear(backend: TritonBackend, rows: int) -> None:
    for outputs, inputs in ((4096, 4096), (128, 96), (28672, 4096)):
        backend.linear(empty(rows, inputs), empty(outputs, inputs), empty(outputs))
        backend.linear(empty(rows, inputs), empty(outputs, inputs), None, empty(rows, outputs))


def of_rows(backend: TritonBackend, rows: int) -> None:
    backend.rms_norm(empty(rows, 4096), empty(4096), 1e-5)
    backend.rms_norm(empty(rows, 48 * 128)[:, :4096].view(rows, 32, 128), empty(128), 1e-5)
    backend.add_and_norm(empty(rows, 4096), empty(rows, 4096), empty(4096), 1e-5)
    backend.silu_mul(empty(rows, 28672))


def rotary(backend: TritonBackend, rows: int) -> None:
    fused = empty(rows, 48 * 128)
    q, k, v = (
        part.view(rows, -1, 128) for part in fused.split((32 * 128, 8 * 128, 8 * 128), dim=1)
    )
    angles = (empty(rows, 64, dtype=torch.float32), empty(rows, 64, dtype=torch.float32))
    slots, pools = empty(rows, dtype=torch.int64), (empty(99, 8, 128), empty(99, 8, 128))
    backend.rope(q, *angles)
    backend.rope_and_write(q, k, v, angles, pools, slots)


def attention(backend: TritonBackend, rows: int) -> None:
    slots = empty(rows, dtype=torch.int64)
    for context in (0, 255, 256, 1000, 5000):
        before = empty(context, dtype=torch.int64)
        prefill = Segment(rows, before, slots, None)
        tree = Segment(min(rows, 64), before, slots[:64], slots[:64])
        for segment in (prefill, tree):
            batch = AttentionBatch(slots, slots, (segment,))
            for heads, kv_heads, d in ((32, 8, 128), (9, 3, 64), (16, 8, 256)):
                pool = empty(99, kv_heads, d)
                backend.tree_attention(empty(segment.rows, heads, d), pool, pool, batch)


def sample(backend: TritonBackend, rows: int) -> None:
    column = empty(rows, dtype=torch.float64)
    top_k = empty(rows, dtype=torch.int32)
    logits = empty(rows, 128256, dtype=torch.float32)
    backend.draw(logits, column, column, top_k, column, column)


@pytest.mark.parametrize("call", [linear, of_rows, rotary, attention, sample])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_rows_choose_no_constant_and_no_specialized_argument(
    call: Callable[[TritonBackend, int], None],
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[Launch] = []

    def keep(launch: Launch) -> None:
        launched.append(launch)

    monkeypatch.setattr(Launch, "run", keep)
    binaries: list[set[object]] = []
    for rows in ROWS:
        launched.clear()
        call(TritonBackend(capability), rows)
        binaries.append({binary_of(launch) for launch in launched})
    assert all(binary == binaries[0] for binary in binaries)


def binary_of(launch: Launch) -> object:
    """What triton.jit chooses a compiled kernel by. It specializes for integers that are 1 or
    multiples of 16, unless it is told not to."""
    kernel = launch.kernel
    unspecialized = unspecialized_of(kernel)
    values: list[str] = []
    for name, argument in zip(kernel.arg_names, launch.arguments, strict=False):
        if isinstance(argument, Tensor):
            values.append(str(argument.dtype))
        elif isinstance(argument, int):
            free = name in unspecialized
            values.append("int" if free else f"int {argument == 1} {argument % 16 == 0}")
        else:
            values.append(str(argument))
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return (kernel.fn.__name__, tuple(values), constants, launch.warps, launch.stages)


def unspecialized_of(kernel: Any) -> set[str]:
    if isinstance(kernel, InterpretedFunction):
        return set(kernel.kwargs["do_not_specialize"] or ())
    return {each.name for each in kernel.params if each.do_not_specialize}
