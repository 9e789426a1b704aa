"""Inverse frequencies of rotary position embedding, for every published kind of scaling."""

import math

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import RotaryTable


def rotary_table(config: DecoderConfig, device: torch.device | None = None) -> RotaryTable:
    """The angles of `config`'s rope.

    `dynamic` depends on the length of the sequence; it is frozen at the maximum context, since
    otherwise the keys in the cache would belong to other angles than the queries.
    """
    rope, dim = config.rope, config.head_dim
    scale = 1.0
    if rope.kind == "yarn":
        frequencies, scale = _yarn(rope, dim), _yarn_scale(rope)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, dim)
    elif rope.kind == "dynamic":
        frequencies = _plain(_dynamic_theta(rope, dim, config.max_context), dim)
    elif rope.kind == "linear":
        frequencies = _plain(rope.theta, dim) / rope.factor
    else:
        frequencies = _plain(rope.theta, dim)
    return RotaryTable(frequencies.to(device), scale)


def _plain(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim  # [head_dim / 2]
    return 1.0 / theta**exponents


def _original_max_position(rope: RopeConfig) -> int:
    assert rope.original_max_position is not None, f"{rope.kind} rope without its trained length"
    return rope.original_max_position


def _dynamic_theta(rope: RopeConfig, dim: int, max_context: int) -> float:
    """NTK-aware scaling (bloc97 and emozilla 2023) for sequences of `max_context` tokens."""
    original = _original_max_position(rope)
    stretch = rope.factor * max(max_context, original) / original - (rope.factor - 1)
    return rope.theta * stretch ** (dim / (dim - 2))


def _llama3(rope: RopeConfig, dim: int) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    original = _original_max_position(rope)
    frequencies = _plain(rope.theta, dim)
    waves = 2 * math.pi / frequencies
    blend = (original / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    slowed = torch.where(
        waves > original / rope.low_freq_factor, frequencies / rope.factor, blended
    )
    return torch.where(waves < original / rope.high_freq_factor, frequencies, slowed)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolated where a dimension turns less than
    `beta_slow` times over the original context, kept where it turns more than `beta_fast`."""
    original = _original_max_position(rope)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = _plain(rope.theta, dim)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    """Of cos and sin, hence squared in the scores (section 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
