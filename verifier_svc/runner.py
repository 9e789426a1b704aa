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
    greedy: bool = False  # not the logits are wanted but the ids of the largest


class Runner:
    """The target model with its pool of token slots: K/V, and the features beside them."""

    def __init__(self, model: Decoder, slots: int, feature_layers: tuple[int, ...] = ()) -> None:
        """`feature_layers`: whose inputs are kept as features; none: what follows the final
        norm."""
        self.model = model
        self.slots = slots
        self.cache = model.new_cache(slots)
        self.feature_layers = feature_layers
        width = model.config.hidden_size * max(1, len(feature_layers))
        self.features = torch.zeros((slots, width), dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Runs one pass. Returns logits [wanted, vocab] (fp32) per session, of a greedy one the ids
        of the largest [wanted]."""
        tokens, attention = tensors(batch, self.model.device)
        if self.feature_layers:
            hidden, features = self.model.forward_with_inputs(
                tokens, self.cache, attention, self.feature_layers
            )
        else:
            hidden = features = self.model.forward(tokens, self.cache, attention)
        self.features.index_copy_(0, attention.slots, features)
        return scores(self.model, hidden, batch)

    def idle(self) -> float | None:
        """To be called instead of `run` where there is nothing to run, and again at the time of
        `time.monotonic` that it returns, if any."""
        return None

    def close(self) -> None:
        """After the last pass."""

    def read_features(self, slots: Sequence[int]) -> bytes:
        """Features of `slots` as little-endian rows in the model's dtype."""
        rows = self.features[_ids(slots, self.model.device)].cpu()
        return rows.view(torch.uint8).numpy().tobytes()


def tensors(batch: Sequence[Rows], device: torch.device) -> tuple[Tensor, AttentionBatch]:
    """The tokens [rows] of a pass, and what they read and write."""
    tokens = _ids([token for rows in batch for token in rows.tokens], device)
    slots = _ids([slot for rows in batch for slot in rows.slots], device)
    positions = _ids([position for rows in batch for position in rows.positions], device)
    segments: list[Segment] = []
    start = 0
    for rows in batch:
        stop = start + len(rows.tokens)
        masks = None if rows.masks is None else _ids(rows.masks, device)
        context = _ids(rows.context, device)
        segments.append(Segment(stop - start, context, slots[start:stop], masks))
        start = stop
    return tokens, AttentionBatch(slots, positions, tuple(segments))


def scores(model: Decoder, hidden: Tensor, batch: Sequence[Rows]) -> list[Tensor]:
    """What `Runner.run` returns, from features [rows, hidden]: of one product for all."""
    greedy, others = list[int](), list[int]()
    start = 0
    for rows in batch:
        start += len(rows.tokens)
        (greedy if rows.greedy else others).extend(range(start - rows.logits, start))
    if not greedy and not others:
        return [hidden.new_empty((0, model.config.vocab_size)) for _ in batch]
    wanted = hidden[_ids(greedy + others, hidden.device)]  # [wanted, hidden]
    ids, logits = model.scores(wanted, len(greedy))
    ids_of = iter(ids.split([rows.logits for rows in batch if rows.greedy]))
    logits_of = iter(logits.split([rows.logits for rows in batch if not rows.greedy]))
    return [next(ids_of if rows.greedy else logits_of) for rows in batch]


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
