"""A kernel with everything that one call of it needs; nothing has run yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Argument = Tensor | int | float | None


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any  # of triton.jit
    programs: int
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Any]  # known when it is compiled
    warps: int
    stages: int = 1  # of a loop's loads in flight

    def run(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](
                *self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
            )
