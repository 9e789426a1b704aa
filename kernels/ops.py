"""The one place that chooses a backend for an operation.

bf16 and fp32 on the CPU go to the native library where it was built: there the bits of a row depend
on that row alone (exact mode). bf16 and fp16 on a GPU go to Triton kernels, which are made for the
same (see docs/kernels-gpu.md for what was seen of it). Everything else is served by plain torch.
Gradients are torch's too.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import reference
from kernels.batch import AttentionBatch, KVCache
from kernels.cpu.backend import CpuBackend
from kernels.cpu.layer import plan_layer
from kernels.cpu.library import TYPES, open_library
from kernels.cpu.memory import Arena
from kernels.layer import LayerSizes, LayerWeights
from kernels.packed import PackedWeight, Weight, dense
from kernels.triton.opening import open_backend

if TYPE_CHECKING:
    from kernels.triton.backend import TritonBackend

CPU = torch.device("cpu")

__all__ = [
    "LayerSizes",
    "LayerWeights",
    "PackedWeight",
    "Weight",
    "argmax",
    "best_tokens",
    "dense",
    "describe",
    "gated_linear",
    "linear",
    "native_backends",
    "pack",
    "pack_layer",
    "quantizes",
    "quantizing_speeds_up",
    "rms_norm",
    "rope",
    "rope_and_write",
    "rotary_angles",
    "run_layers",
    "runs_layers",
    "sample",
    "set_threads",
    "silu_mul",
    "tree_attention",
    "use_backend",
    "zeros",
]


def native_backends() -> tuple[CpuBackend, ...]:
    """What this machine can run, best first; empty where the library was not built."""
    library = open_library()
    return tuple(CpuBackend(library, s) for s in library.instruction_sets) if library else ()


_BEST = next(iter(native_backends()), None)
_backend: ContextVar["CpuBackend | TritonBackend | None"] = ContextVar(
    "kernels_backend", default=_BEST
)
_chosen: ContextVar[bool] = ContextVar("kernels_backend_chosen", default=False)


@contextmanager
def use_backend(backend: "CpuBackend | TritonBackend | None") -> Generator[None]:
    """Another backend than the best one for the calls inside; None: plain torch."""
    token, chosen = _backend.set(backend), _chosen.set(True)
    try:
        yield
    finally:
        _backend.reset(token)
        _chosen.reset(chosen)


def describe(device: torch.device = CPU) -> str:
    """What serves a device, for fingerprints: its numbers are equal where this is equal."""
    backend = _backend_of(device)
    return "torch" if backend is None else backend.name


def set_threads(count: int | None) -> None:
    """How many threads share one operation in this process; None: as many as there are cores.

    Where the native library serves, torch keeps to one: its threads would spin for milliseconds
    behind each of its operations, on the cores that the library's threads need.
    """
    if isinstance(backend := _backend.get(), CpuBackend):
        backend.set_threads(count or len(os.sched_getaffinity(0)))
        torch.set_num_threads(1)
    elif count is not None:
        torch.set_num_threads(count)


def _backend_of(device: torch.device) -> "CpuBackend | TritonBackend | None":
    if device.type == "cuda" and not _chosen.get():
        return open_backend(device)
    return _backend.get()


def _native(x: Tensor) -> CpuBackend | None:
    """The native library, if it takes this tensor."""
    if x.dtype not in TYPES or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
        return None
    backend = _backend.get()
    return backend if isinstance(backend, CpuBackend) else None


def _serving(x: Tensor) -> "CpuBackend | TritonBackend | None":
    """What takes this tensor, if it is not plain torch."""
    if x.requires_grad and torch.is_grad_enabled():
        return None
    backend = _backend_of(x.device)
    if backend is None or isinstance(backend, CpuBackend):
        return _native(x)
    return backend if backend.takes(x) else None


def pack(weight: Weight, quantize: bool = False) -> Weight:
    """The weight [out, in] in the order in which this machine's `linear` reads it best; in int8
    with `quantize`, where `quantizes` says that it can be. One that is packed stays as it is."""
    if isinstance(weight, PackedWeight) or (backend := _packing(weight, quantize)) is None:
        return weight
    return backend.pack(weight, quantize)


def pack_layer(weights: LayerWeights, sizes: LayerSizes, quantize: bool = False) -> LayerWeights:
    """All weights of a layer packed, and the layer in one call where that is possible."""
    packed = replace(
        weights,
        qkv=pack(weights.qkv, quantize),
        o=pack(weights.o, quantize),
        gate_up=_pack_gated(weights.gate_up, quantize),
        down=pack(weights.down, quantize),
    )
    if not isinstance(packed.qkv, PackedWeight) or sizes.head_dim % 2:
        return packed
    return replace(packed, plan=plan_layer(packed, sizes, TYPES[packed.post_norm.dtype]))


def _pack_gated(weight: Weight, quantize: bool) -> Weight:
    if isinstance(weight, PackedWeight) or (backend := _packing(weight, quantize)) is None:
        return weight
    return backend.pack_gated(weight, quantize)


def _packing(weight: Tensor, quantize: bool) -> CpuBackend | None:
    if quantize and not quantizes(weight.dtype, weight.device):
        raise ValueError(f"no int8 for {weight.dtype} on {weight.device}: {describe()}")
    return _native(weight.detach())


def quantizes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type can be packed in int8: by the native library alone."""
    backend = _backend.get()
    return isinstance(backend, CpuBackend) and device.type == "cpu" and dtype in TYPES


def quantizing_speeds_up(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of several rows are faster in int8: our int8 kernels multiply in fp32, so
    not where bf16 has an instruction of its own, which does twice as much."""
    backend = _backend.get()
    if not isinstance(backend, CpuBackend) or not quantizes(dtype, device):
        return False
    return dtype != torch.bfloat16 or not backend.multiplies_bf16


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """See reference.linear. Exact (row-invariant) for packed weights and by Triton alone; `wide`
    then skips the rounding to x's type."""
    backend = _serving(x)
    if isinstance(weight, PackedWeight):
        if isinstance(backend, CpuBackend):
            return backend.linear(x, weight, bias, residual, wide)
    elif backend is not None and not isinstance(backend, CpuBackend) and not weight.requires_grad:
        return backend.linear(x, weight, bias, residual, wide)
    return reference.linear(x, dense(weight).to(x.dtype), bias, residual, wide)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if (backend := _serving(x)) is not None and not weight.requires_grad:
        return backend.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if (backend := _native(frequencies)) is not None and positions.is_cpu:
        return backend.rotary_angles(positions, frequencies, scale)
    return reference.rotary_angles(positions, frequencies, scale)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if (backend := _serving(x)) is not None:
        return backend.rope(x, cos, sin)
    return reference.rope(x, cos, sin)


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of the gates and ups that linear(x, weight, bias) gives: [rows, inner]."""
    if isinstance(weight, PackedWeight) and (backend := _native(x)) is not None:
        return backend.gated_linear(x, weight, bias)
    return silu_mul(linear(x, dense(weight), bias))


def silu_mul(gate_up: Tensor) -> Tensor:
    if (backend := _serving(gate_up)) is not None:
        return backend.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of zeros, in large pages of its own where it lies in the host's memory."""
    if device.type == "cpu":
        return Arena().zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """q [rows, heads, d] rotated by `angles` (cos and sin). The pools of K and V [slots, kv_heads,
    d] take rotated k and plain v, both [rows, kv_heads, d], at slots [rows]."""
    backend = _serving(q)
    if backend is not None and not isinstance(backend, CpuBackend):
        return backend.rope_and_write(q, k, v, angles, pools, slots)
    reference.write_kv(pools[0], slots, rope(k, *angles))
    reference.write_kv(pools[1], slots, v)
    return rope(q, *angles)


def tree_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch) -> Tensor:
    if (backend := _serving(q)) is not None and q.shape[-1] % 2 == 0:
        return backend.tree_attention(q, k_pool, v_pool, batch)
    return reference.tree_attention(q, k_pool, v_pool, batch)


def argmax(logits: Tensor) -> Tensor:
    """Ids [rows] of the largest of logits [rows, vocab] (fp32), the lowest of equals."""
    if (backend := _native(logits)) is not None and logits.dtype == torch.float32:
        return backend.best(logits, 1, log_probabilities=False)[0].flatten()
    return reference.argmax(logits)


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the `count` likeliest of logits [rows, vocab] (fp32): both
    [rows, count], best first and of equals the lowest id."""
    if (backend := _native(logits)) is not None and logits.dtype == torch.float32:
        return backend.best(logits, count, log_probabilities=True)
    return reference.best_tokens(logits, count)


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniforms: Tensor,
) -> Tensor:
    """Ids [rows] drawn from logits [rows, vocab] (fp32), see reference.sample. A row's id depends
    on its logits, the parameters and its number of uniforms [rows] alone."""
    backend = _backend_of(logits.device)
    if isinstance(backend, CpuBackend):
        backend = _native(logits)
    usual = logits.dtype == torch.float32 and temperature >= reference.GREEDY_BELOW
    if backend is not None and usual:
        return backend.sample(logits, temperature, top_k, top_p, min_p, uniforms)
    return reference.sample(logits, temperature, top_k, top_p, min_p, uniforms)


def runs_layers(layers: Sequence[LayerWeights], hidden: Tensor) -> bool:
    """Whether `run_layers` can take these weights for these rows."""
    return all(layer.plan is not None for layer in layers) and _native(hidden) is not None


def run_layers(
    hidden: Tensor,
    layers: Sequence[LayerWeights],
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    batch: AttentionBatch,
) -> Tensor:
    """All pre-norm decoder layers in a single call: bit for bit what their operations give."""
    backend = _native(hidden)
    plans = [layer.plan for layer in layers if layer.plan is not None]
    assert backend is not None and len(plans) == len(layers), "only where runs_layers says so"
    return backend.run_layers(plans, hidden, angles, cache, batch)
