"""Weights in the order in which a native `linear` reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUTS_OF_BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs] as [outputs / 32][inputs / unit][32][unit], zero-padded; a unit
    is two bf16 values, one fp32 value, or one int8 value that counts times its output's scale."""

    panels: Tensor  # [blocks, units, 32, unit]
    outputs: int
    inputs: int
    gated: bool = False  # gates and ups, 16 of each in turn, for `gated_linear`
    scales: Tensor | None = None  # [outputs] fp32, in the panels' order; of int8 panels alone

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type can be multiplied with it."""
        return self.scales is not None or dtype == self.dtype

    @property
    def device(self) -> torch.device:
        return self.panels.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.outputs, self.inputs))

    def dense(self) -> Tensor:
        """The weight as it was given [outputs, inputs]; of int8, in fp32, what is left of it."""
        blocks, units, width, unit = self.panels.shape
        whole = self.panels.transpose(1, 2).reshape(blocks * width, units * unit)
        if self.scales is not None:
            whole = whole[: self.outputs] * self.scales[:, None]
        if self.gated:
            whole = whole.view(blocks, 2, width // 2, -1).transpose(0, 1).reshape(whole.shape)
        return whole[: self.outputs, : self.inputs].contiguous()


Weight = Tensor | PackedWeight


def dense(weight: Weight) -> Tensor:
    return weight.dense() if isinstance(weight, PackedWeight) else weight
