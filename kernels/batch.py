"""Which keys the rows of a forward pass read and where they write theirs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a pass: `rows` consecutive rows of the batch.

    Every row reads all of `context`, and of `tail` the keys that its mask allows: bit j of the
    row's 64-bit mask stands for tail[j] (a tree, at most 64 tail keys). A causal segment has no
    masks: its tail is the rows' own slots and row i reads tail[: i + 1] (a prefill chunk).
    """

    rows: int
    context: Tensor  # [context] int64 slots
    tail: Tensor  # [tail] int64 slots
    masks: Tensor | None  # [rows] int64, or None for causal


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A variable-length batch of segments, row after row."""

    slots: Tensor  # [rows] int64, where each row's K/V is written
    positions: Tensor  # [rows] int64, absolute positions
    segments: tuple[Segment, ...]
    # The segments once more, flat, for kernels that take pointers: made once for all layers.
    shares: Tensor = field(init=False)  # [segments, 4] int64: rows, context, tail, masked; on host
    keys: Tensor = field(init=False)  # int64, per segment: context, tail and, if any, masks

    def __post_init__(self) -> None:
        shares = [
            (s.rows, len(s.context), len(s.tail), int(s.masks is not None)) for s in self.segments
        ]
        parts = [
            part for s in self.segments for part in (s.context, s.tail, s.masks) if part is not None
        ]
        object.__setattr__(self, "shares", torch.tensor(shares, dtype=torch.int64))
        object.__setattr__(self, "keys", torch.cat(parts) if parts else self.slots)


@dataclass(frozen=True, slots=True)
class KVCache:
    """A pool of token slots (page size one): K and V of every layer."""

    k: Tensor  # [layers, slots, kv_heads, head_dim]
    v: Tensor  # [layers, slots, kv_heads, head_dim]
