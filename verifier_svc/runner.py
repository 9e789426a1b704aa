"""Turns the shares of a pass into tensors and runs the target. Only this and the model see a
device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.models.decoder import Decoder
from kernels.batch import AttentionBatch, Segment


@dataclass(frozen=True, slots=True)
class Rows:
    """One session's rows of a pass."""

    tokens: Sequence[int]  # [rows]
    positions: Sequence[int]  # [rows]
    slots: Sequence[int]  # [rows] where K/V and features go
    context: Sequence[int]  # slots of all earlier positions
    masks: Sequence[int] | None  # [rows] ancestry words, None: causal
    logits: int  # of how many rows, counted from the last, logits are wanted


class Runner:
    """The target model with its pool of token slots: K/V, and the features beside them."""

    def __init__(self, model: Decoder, slots: int, feature_layers: tuple[int, ...] = ()) -> None:
        """`feature_layers`: whose inputs are kept as features; none: what follows the final
        norm."""
        self.model = model
        self.cache = model.new_cache(slots)
        self.feature_layers = feature_layers
        width = model.config.hidden_size * max(1, len(feature_layers))
        self.features = torch.zeros((slots, width), dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Runs one pass. Returns logits [wanted, vocab] (fp32) per session."""
        tokens = self._ids([token for rows in batch for token in rows.tokens])
        slots = self._ids([slot for rows in batch for slot in rows.slots])
        positions = self._ids([position for rows in batch for position in rows.positions])
        segments: list[Segment] = []
        start = 0
        for rows in batch:
            stop = start + len(rows.tokens)
            masks = None if rows.masks is None else self._ids(rows.masks)
            context = self._ids(rows.context)
            segments.append(Segment(stop - start, context, slots[start:stop], masks))
            start = stop
        attention = AttentionBatch(slots, positions, tuple(segments))
        if self.feature_layers:
            hidden, features = self.model.forward_with_inputs(
                tokens, self.cache, attention, self.feature_layers
            )
        else:
            hidden = features = self.model.forward(tokens, self.cache, attention)
        self.features.index_copy_(0, slots, features)
        return self._logits(hidden, batch)

    def _logits(self, hidden: Tensor, batch: Sequence[Rows]) -> list[Tensor]:
        wanted: list[int] = []
        start = 0
        for rows in batch:
            start += len(rows.tokens)
            wanted.extend(range(start - rows.logits, start))
        if not wanted:
            return [hidden.new_empty((0, self.model.config.vocab_size)) for _ in batch]
        logits = self.model.logits(hidden[self._ids(wanted)])
        return list(torch.split(logits, [rows.logits for rows in batch]))

    def read_features(self, slots: Sequence[int]) -> bytes:
        """Features of `slots` as little-endian rows in the model's dtype."""
        rows = self.features[self._ids(slots)].cpu()
        return rows.view(torch.uint8).numpy().tobytes()

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
