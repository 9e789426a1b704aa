"""The operations of the native library for tensors on the CPU in bf16 or fp32.

Same meaning as kernels.reference, and row-invariant: the bits of a row depend on that row alone.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import AttentionBatch, KVCache
from kernels.cpu.library import InstructionSet, Library
from kernels.layer import LayerPlan
from kernels.packed import OUTPUTS_OF_BLOCK, PackedWeight

TYPES = {torch.bfloat16: 0, torch.float32: 1}


@dataclass(frozen=True, slots=True, eq=False)
class CpuBackend:
    library: Library
    instruction_set: InstructionSet

    @property
    def name(self) -> str:
        return f"cpu-native {self.instruction_set.name}"

    def set_threads(self, count: int) -> None:
        self.library.functions.coppice_set_threads(count)

    def pack(self, weight: Tensor) -> PackedWeight:
        outputs, inputs = weight.shape
        unit = 2 if weight.dtype == torch.bfloat16 else 1
        shape = (-(-outputs // OUTPUTS_OF_BLOCK), -(-inputs // unit), OUTPUTS_OF_BLOCK, unit)
        panels = torch.empty(shape, dtype=weight.dtype)
        weight = weight.detach().contiguous()
        self.library.functions.coppice_pack(
            TYPES[weight.dtype], weight.data_ptr(), outputs, inputs, panels.data_ptr()
        )
        return PackedWeight(panels, outputs, inputs)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        wide: bool,
    ) -> Tensor:
        rows = x.shape[0]
        _expect(x.dtype == weight.dtype and x.shape == (rows, weight.inputs), "x", x)
        x = x.contiguous()
        shape = (rows, weight.outputs)
        out = torch.empty(shape, dtype=torch.float32 if wide else x.dtype)  # [rows, outputs]
        if residual is not None:
            _expect(residual.shape == shape and residual.dtype == x.dtype, "residual", residual)
            residual = residual.contiguous()
        if bias is not None:
            _expect(bias.shape == shape[1:] and bias.dtype == x.dtype, "bias", bias)
        self.library.functions.coppice_linear(
            self.instruction_set.kernels,
            TYPES[x.dtype],
            weight.panels.data_ptr(),
            weight.outputs,
            weight.inputs,
            x.data_ptr(),
            rows,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            wide,
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

    def run_layer(
        self,
        plan: LayerPlan,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
    ) -> Tensor:
        rows = hidden.shape[0]
        cos, sin = angles
        sizes = plan.sizes
        _expect(hidden.dtype == cache.k.dtype, "hidden", hidden)
        _expect(len(batch.slots) == rows, "slots", batch.slots)
        _expect(cos.shape == sin.shape == (rows, sizes.head_dim // 2), "angles", cos)
        for pool in (cache.k, cache.v):
            fits = pool.shape[2:] == (sizes.kv_heads, sizes.head_dim) and pool.is_contiguous()
            _expect(fits and layer < pool.shape[0], "cache", pool)
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)  # [rows, hidden]
        offset = layer * cache.k.stride(0) * cache.k.element_size()
        self.library.functions.coppice_layer(
            self.instruction_set.kernels,
            ctypes.addressof(plan.table),
            hidden.data_ptr(),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slots.data_ptr(),
            cache.k.data_ptr() + offset,
            cache.v.data_ptr() + offset,
            batch.shares.data_ptr(),
            batch.keys.data_ptr(),
            len(batch.segments),
            out.data_ptr(),
        )
        return out


def _expect(holds: bool, name: str, given: Tensor) -> None:
    """The library trusts its pointers, so shapes and types are checked in front of it."""
    if not holds:
        shape = list(given.shape)
        raise ValueError(f"{name} {shape} of {given.dtype} does not fit the other operands")
