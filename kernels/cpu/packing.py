"""Weights into the order in which the native library reads them."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu.library import TYPES, Library
from kernels.cpu.memory import Arena
from kernels.packed import OUTPUTS_OF_BLOCK, PackedWeight

_weights = Arena()


def pack(library: Library, weight: Tensor, quantize: bool) -> PackedWeight:
    """The weight [outputs, inputs] as it is, or in int8 (see src/quantize.hpp for the rule)."""
    outputs, inputs = weight.shape
    unit = 2 if weight.dtype == torch.bfloat16 and not quantize else 1
    shape = (-(-outputs // OUTPUTS_OF_BLOCK), -(-inputs // unit), OUTPUTS_OF_BLOCK, unit)
    panels = _weights.zeros(shape, torch.int8 if quantize else weight.dtype)
    weight = weight.detach().contiguous()
    given = TYPES[weight.dtype], weight.data_ptr(), outputs, inputs, panels.data_ptr()
    if not quantize:
        library.functions.coppice_pack(*given)
        return PackedWeight(panels, outputs, inputs)
    scales = torch.empty(outputs)
    library.functions.coppice_quantize(*given, scales.data_ptr())
    return PackedWeight(panels, outputs, inputs, scales=scales)


def pack_gated(library: Library, weight: Tensor, quantize: bool) -> PackedWeight:
    """Gates and ups [2 * inner, in] for `gated_linear`, or as `pack` does where inner is not a
    multiple of half a block."""
    half = OUTPUTS_OF_BLOCK // 2
    if weight.shape[0] % OUTPUTS_OF_BLOCK:
        return pack(library, weight, quantize)
    turns = weight.view(2, -1, half, weight.shape[1]).transpose(0, 1).reshape(weight.shape)
    return replace(pack(library, turns, quantize), gated=True)
