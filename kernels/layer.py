"""The weights of one decoder layer, as every backend takes them."""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from kernels.packed import Weight


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What the arithmetic of a layer needs beside its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of the norms


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """A layer's weights by their addresses; valid as long as the weights beside it."""

    table: ctypes.Structure
    sizes: LayerSizes

    @property
    def address(self) -> int:
        return ctypes.addressof(self.table)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, with q, k, v and gate, up fused along their outputs."""

    input_norm: Tensor | None  # [hidden]; None: the layer takes its input as it is (EAGLE-1/2)
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, hidden]; of EAGLE-3 2 * hidden
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Weight  # [hidden, heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, intermediate]
    down_bias: Tensor | None
    plan: LayerPlan | None = None  # None: the layer runs operation by operation
