"""The operations of the native library for tensors on the CPU in bf16 or fp32.

Same meaning as kernels.reference, and row-invariant: the bits of a row depend on that row alone.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.batch import AttentionBatch, KVCache
from kernels.cpu.library import TYPES, InstructionSet, Library
from kernels.cpu.memory import LARGE, Recycler
from kernels.cpu.packing import pack, pack_gated
from kernels.layer import LayerPlan
from kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class CpuBackend:
    library: Library
    instruction_set: InstructionSet
    _large: Recycler = field(default_factory=Recycler)

    @property
    def name(self) -> str:
        return f"cpu-native {self.instruction_set.name}"

    @property
    def multiplies_bf16(self) -> bool:
        """By an instruction for it; otherwise bf16 is expanded to fp32."""
        return self.instruction_set.name == "avx512_bf16"

    def set_threads(self, count: int) -> None:
        self.library.functions.coppice_set_threads(count)

    def pack(self, weight: Tensor, quantize: bool = False) -> PackedWeight:
        return pack(self.library, weight, quantize)

    def pack_gated(self, weight: Tensor, quantize: bool = False) -> PackedWeight:
        return pack_gated(self.library, weight, quantize)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        wide: bool,
    ) -> Tensor:
        _expect(not weight.gated, "weight", weight.panels)
        return self._linear(x, weight, bias, residual, wide)

    def gated_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        if not weight.gated:
            return self.silu_mul(self._linear(x, weight, bias, None, False))
        return self._linear(x, weight, bias, None, False)

    def _linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        wide: bool,
    ) -> Tensor:
        rows = x.shape[0]
        _expect(weight.takes(x.dtype) and x.shape == (rows, weight.inputs), "x", x)
        x = x.contiguous()
        shape = (rows, weight.outputs // 2 if weight.gated else weight.outputs)
        dtype = torch.float32 if wide else x.dtype
        is_large = shape[0] * shape[1] * dtype.itemsize >= LARGE
        out = (self._large if is_large else torch).empty(shape, dtype=dtype)  # [rows, outputs]
        if residual is not None:
            _expect(residual.shape == shape and residual.dtype == x.dtype, "residual", residual)
            residual = residual.contiguous()
        if bias is not None:
            _expect(bias.shape == (weight.outputs,) and bias.dtype == x.dtype, "bias", bias)
        self.library.functions.coppice_linear(
            self.instruction_set.kernels,
            TYPES[x.dtype],
            weight.panels.data_ptr(),
            weight.outputs,
            weight.inputs,
            None if weight.scales is None else weight.scales.data_ptr(),
            x.data_ptr(),
            rows,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            wide,
            weight.gated,
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        _expect(weight.shape == (d,) and weight.dtype == x.dtype, "weight", weight)
        x = x.contiguous()
        out = torch.empty_like(x)
        self.library.functions.coppice_rms_norm(
            self.instruction_set.kernels,
            TYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            x.numel() // d,
            d,
            eps,
            out.data_ptr(),
        )
        return out

    def rotary_angles(
        self, positions: Tensor, frequencies: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        shape = (len(positions), len(frequencies))
        _expect(positions.dtype == torch.int64, "positions", positions)
        _expect(frequencies.dtype == torch.float32, "frequencies", frequencies)
        positions = positions.contiguous()
        cos, sin = torch.empty(shape), torch.empty(shape)  # [rows, d / 2] both
        self.library.functions.coppice_angles(
            positions.data_ptr(),
            frequencies.data_ptr(),
            *shape,
            scale,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return cos, sin

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, d = x.shape
        for angles in (cos, sin):
            _expect(angles.shape == (rows, d // 2) and angles.is_contiguous(), "angles", angles)
        if x.stride(2) != 1 or x.stride(1) != d:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)  # [rows, heads, d]
        self.library.functions.coppice_rope(
            self.instruction_set.kernels,
            TYPES[x.dtype],
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            heads,
            d,
            x.stride(0),
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)  # [rows, d]
        self.library.functions.coppice_silu_mul(
            self.instruction_set.kernels,
            TYPES[gate_up.dtype],
            gate_up.data_ptr(),
            rows,
            width // 2,
            out.data_ptr(),
        )
        return out

    def tree_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch
    ) -> Tensor:
        _, heads, d = q.shape
        for pool in (k_pool, v_pool):
            _expect(pool.dtype == q.dtype and pool.is_contiguous(), "pool", pool)
        q = q.contiguous()
        out = torch.empty_like(q)  # [rows, heads, d]
        self.library.functions.coppice_attention(
            self.instruction_set.kernels,
            TYPES[q.dtype],
            q.data_ptr(),
            k_pool.data_ptr(),
            v_pool.data_ptr(),
            heads,
            k_pool.shape[1],
            d,
            batch.shares.data_ptr(),
            batch.keys.data_ptr(),
            len(batch.segments),
            out.data_ptr(),
        )
        return out

    def run_layers(
        self,
        plans: Sequence[LayerPlan],
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor:
        rows = hidden.shape[0]
        cos, sin = angles
        sizes = plans[0].sizes
        _expect(hidden.dtype == cache.k.dtype, "hidden", hidden)
        _expect(len(batch.slots) == rows, "slots", batch.slots)
        _expect(cos.shape == sin.shape == (rows, sizes.head_dim // 2), "angles", cos)
        for pool in (cache.k, cache.v):
            fits = pool.shape[2:] == (sizes.kv_heads, sizes.head_dim) and pool.is_contiguous()
            _expect(fits and len(plans) <= pool.shape[0], "cache", pool)
        out = hidden.clone(memory_format=torch.contiguous_format)  # [rows, hidden]
        tables = (ctypes.c_void_p * len(plans))(*(plan.address for plan in plans))
        self.library.functions.coppice_layers(
            self.instruction_set.kernels,
            ctypes.addressof(tables),
            len(plans),
            out.data_ptr(),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slots.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            cache.k.stride(0) * cache.k.element_size(),
            batch.shares.data_ptr(),
            batch.keys.data_ptr(),
            len(batch.segments),
        )
        return out

    def best(self, x: Tensor, count: int, log_probabilities: bool) -> tuple[Tensor, Tensor]:
        rows, n = x.shape
        _expect(x.dtype == torch.float32 and 0 < count <= n, "x", x)
        x = x.contiguous()
        ids = torch.empty((rows, count), dtype=torch.int64)
        values = torch.empty((rows, count))
        self.library.functions.coppice_best(
            self.instruction_set.kernels,
            x.data_ptr(),
            rows,
            n,
            count,
            ids.data_ptr(),
            values.data_ptr(),
            log_probabilities,
        )
        return ids, values

    def sample(
        self,
        x: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        uniforms: Tensor,
    ) -> Tensor:
        rows, n = x.shape
        _expect(x.dtype == torch.float32 and n > 0, "x", x)
        fits = uniforms.shape == (rows,) and uniforms.dtype == torch.float64 and uniforms.is_cpu
        _expect(fits, "uniforms", uniforms)
        x, uniforms = x.contiguous(), uniforms.contiguous()
        ids = torch.empty(rows, dtype=torch.int64)
        self.library.functions.coppice_sample(
            self.instruction_set.kernels,
            x.data_ptr(),
            rows,
            n,
            temperature,
            top_k,
            top_p,
            min_p,
            uniforms.data_ptr(),
            ids.data_ptr(),
        )
        return ids


def _expect(holds: bool, name: str, given: Tensor) -> None:
    """The library trusts its pointers, so shapes and types are checked in front of it."""
    if not holds:
        shape = list(given.shape)
        raise ValueError(f"{name} {shape} of {given.dtype} does not fit the other operands")
