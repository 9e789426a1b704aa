"""The operations for tensors on a CUDA device in bf16 or fp16.

Same meaning as kernels.reference. In exact mode no tile, chunk or split depends on the number of
rows, and a row is summed in the same order wherever it stands: see docs/kernels-gpu.md for what
that promises and what was seen.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from triton import knobs

from kernels import reference
from kernels.batch import AttentionBatch
from kernels.triton import launches
from kernels.triton.checks import (
    FP8,
    as_rows,
    expect,
    expect_angles,
    expect_pool,
    expect_scales,
    heads_together,
)
from kernels.triton.plans import Plans
from kernels.triton.tiles import attention_tile, linear_tile

TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """What fp8 K and V are multiplied with when they are read: fp32 [kv_heads] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TritonBackend:
    capability: int  # such as 90 for compute capability 9.0
    exact: bool = True  # False: cuBLAS for `linear`, whose bits depend on the number of rows
    plans: Plans = field(default_factory=Plans, repr=False)

    @property
    def name(self) -> str:
        return f"triton sm_{self.capability} {'exact' if self.exact else 'fast'}"

    def takes(self, x: Tensor) -> bool:
        """Tensors on a GPU (in Triton's interpreter, anywhere) in the types that it knows."""
        return x.dtype in TYPES and (x.is_cuda or knobs.runtime.interpret)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        if not self.exact:
            return reference.linear(x, weight, bias, residual, wide)
        count, (outputs, inputs) = x.shape[0], weight.shape
        expect(x.dtype == weight.dtype and x.shape == (count, inputs), "x", x)
        x, weight = x.contiguous(), weight.contiguous()
        if residual is not None:
            fits = residual.shape == (count, outputs) and residual.dtype == x.dtype
            expect(fits, "residual", residual)
            residual = residual.contiguous()
        if bias is not None:
            expect(bias.shape == (outputs,) and bias.dtype == x.dtype, "bias", bias)
        tile = linear_tile(outputs, inputs, self.capability)
        out = x.new_empty((count, outputs), dtype=torch.float32 if wide else x.dtype)
        if tile.splits == 1:
            launches.multiply(x, weight, bias, residual, out, None, tile).run()
            return out
        sums = x.new_empty((tile.splits, count, outputs), dtype=torch.float32)
        launches.multiply(x, weight, None, None, out, sums, tile).run()
        launches.add_splits(sums, bias, residual, out, x.dtype).run()
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        expect(weight.shape == (d,) and weight.dtype == x.dtype, "weight", weight)
        out = x.new_empty(x.shape)
        launches.norm(as_rows(x), None, weight, out, None, eps).run()
        return out

    def add_and_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + residual [..., d], and its norm."""
        expect(weight.shape == x.shape[-1:] and weight.dtype == x.dtype, "weight", weight)
        expect(residual.shape == x.shape and residual.dtype == x.dtype, "residual", residual)
        added, out = x.new_empty(x.shape), x.new_empty(x.shape)
        launches.norm(as_rows(x), residual.contiguous(), weight, out, added, eps).run()
        return added, out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = heads_together(x), cos.contiguous(), sin.contiguous()
        expect_angles(x, cos, sin)
        out = x.new_empty(x.shape)  # [rows, heads, d]
        launches.rotate(x, cos, sin, out).run()
        return out

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor],
        pools: tuple[Tensor, Tensor],
        slots: Tensor,
        scales: Scales | None = None,
    ) -> Tensor:
        """Rotated q [rows, heads, d]; the pools [slots, kv_heads, d] take rotated k and v (rows of
        [kv_heads, d]) at slots [rows], divided by `scales` where they are fp8."""
        q, k, v = heads_together(q), heads_together(k), heads_together(v)
        cos, sin = (part.contiguous() for part in angles)
        expect_angles(q, cos, sin)
        expect(k.shape == v.shape and k.shape[::2] == q.shape[::2], "k", k)
        k_scale, v_scale = checked_pools(q, pools, k.shape[1], scales)
        out = q.new_empty(q.shape)
        launches.rotate_and_write(
            q, k, v, cos, sin, slots.contiguous(), out, *pools, k_scale, v_scale
        ).run()
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        count, width = gate_up.shape
        out = gate_up.new_empty((count, width // 2))  # [rows, d]
        launches.gate(gate_up.contiguous(), out).run()
        return out

    def tree_attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        scales: Scales | None = None,
    ) -> Tensor:
        """As reference.tree_attention; with fp8 pools and their `scales` too."""
        _, heads, d = q.shape
        kv_heads = k_pool.shape[1]
        k_scale, v_scale = checked_pools(q, (k_pool, v_pool), kv_heads, scales)
        tile = attention_tile(d, scales is not None, self.capability)
        group = heads // kv_heads
        if d > 256 or heads % kv_heads or group > tile.queries:
            raise ValueError(
                f"{heads} query heads of {d} values over {kv_heads} KV heads: at most 256 values "
                f"and {tile.queries} query heads of a KV head are supported"
            )
        plan = self.plans.of(batch, tile.queries // group)
        q = heads_together(q)
        out = q.new_empty(q.shape)
        mixed = q.new_empty((plan.states, heads, d), dtype=torch.float32)
        stats = q.new_empty((plan.states, heads, 2), dtype=torch.float32)  # maximum and sum
        launches.attend(
            q, k_pool, v_pool, out, plan.keys, plan.units, mixed, stats, k_scale, v_scale, tile
        ).run()
        launches.merge(mixed, stats, plan.rows, out, v_scale, kv_heads).run()
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        uniforms: Tensor,
    ) -> Tensor:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(uniforms.shape, value, dtype=dtype, device=logits.device)

        wide = torch.float64
        # No more than the whole vocabulary can be kept, and int32 holds that.
        kept = column(min(top_k, logits.shape[-1]), torch.int32)
        temperatures, least = column(temperature, wide), column(min_p, wide)
        return self.draw(
            logits, temperatures, least, kept, column(top_p, wide), uniforms.to(logits.device)
        )

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """Tokens [rows] int64 of logits [rows, vocab] fp32. A temperature below 1e-5 takes the most
        probable one; min_p = 0, top_k = 0 and top_p = 1 keep all. `uniform` in [0, 1) decides. All
        parameters are [rows], fp64, top_k int32."""
        count, vocab = logits.shape
        expect(logits.dtype == torch.float32, "logits", logits)
        for name, each in (("temperature", temperature), ("min_p", min_p), ("top_p", top_p)):
            expect(each.shape == (count,) and each.dtype == torch.float64, name, each)
        expect(uniform.shape == (count,) and uniform.dtype == torch.float64, "uniform", uniform)
        expect(top_k.shape == (count,) and top_k.dtype == torch.int32, "top_k", top_k)
        mass = logits.new_empty((count, vocab), dtype=torch.float64)
        out = logits.new_empty((count,), dtype=torch.int64)
        launches.draw(
            logits.contiguous(), mass, out, temperature, min_p, top_k, top_p, uniform
        ).run()
        return out


def checked_pools(
    q: Tensor, pools: tuple[Tensor, Tensor], kv_heads: int, scales: Scales | None
) -> tuple[Tensor | None, Tensor | None]:
    """The scales of K and V, None for pools in q's type."""
    for pool in pools:
        expect_pool(pool, q, kv_heads, q.dtype if scales is None else FP8)
    if scales is None:
        return None, None
    expect_scales(scales.k, kv_heads)
    expect_scales(scales.v, kv_heads)
    return scales.k, scales.v
