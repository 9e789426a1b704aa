"""A kernel with everything that one call of it needs; nothing has run yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | None


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any  # of triton.jit
    programs: int
    arguments: tuple[Argument, ...]  # the first one is a tensor
    constants: Mapping[str, Any]  # known when it is compiled
    warps: int
    stages: int = 1  # of a loop's loads in flight

    def run(self) -> None:
        if not self.programs:
            return
        # Triton launches on the current device, torch on that of its operands.
        with torch.cuda.device_of(self.arguments[0]):
            self.kernel[(self.programs,)](
                *self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
            )
