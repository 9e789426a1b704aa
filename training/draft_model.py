"""A small language model that learns to say what the target says: some of the target's own layers,
its embedding and LM head (kept as they are), and the same lessons as the heads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from coppice.models.config import DecoderConfig
from training.learners import Lecture, take
from training.module import Attention, Batch, Mlp, RMSNorm
from training.objective import Losses

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def chosen_layers(count: int, of: int) -> list[int]:
    """`count` layers of a target with `of`: evenly spread, the first and the last among them."""
    if count == 1:
        return [0]
    return [round(index * (of - 1) / (count - 1)) for index in range(count)]


class PlainLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden)
        context = self.self_attn.keys_values(normed, positions)
        hidden = hidden + self.self_attn(normed, positions, context, [])
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Layers(nn.Module):
    """A decoder without its embedding and LM head."""

    def __init__(self, config: DecoderConfig, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainLayer(config) for _ in range(count)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of hidden [sequences, positions, hidden]; without the final norm."""
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return hidden


class DraftModelLearner:
    """A decoder with `layers` of the target's layers."""

    def __init__(self, config: DecoderConfig, lecture: Lecture, layers: int) -> None:
        self.module = Layers(config, layers)
        self._lecture = lecture

    def losses(self, batch: Batch) -> Losses:
        tokens = torch.cat((batch.start[:, None], batch.tokens), 1)
        hidden = self.module(self._lecture.embedding[tokens])  # [sequences, positions + 1, hidden]
        # Position t of the batch is the pair of token x_{t+1}, which is what follows x_t here.
        rows = (batch.positions + 1)[..., None].expand(-1, -1, hidden.shape[-1])
        output = self.module.norm(hidden.gather(1, rows))
        return self._lecture.objective([output], batch)

    def published(self) -> dict[str, Tensor]:
        stored = self.module.state_dict()
        return {f"model.{name}": value.detach() for name, value in stored.items()}

    def load_published(self, stored: Mapping[str, Tensor]) -> None:
        take(self.module, stored, "model.")


def shrunk(target: Mapping[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """The target's weights by published name, with the chosen layers alone, numbered anew."""
    kept = {"model.norm.weight": target["model.norm.weight"]}
    for new, old in enumerate(layers):
        for name, value in target.items():
            if name.startswith(f"model.layers.{old}."):
                kept[name.replace(f"layers.{old}.", f"layers.{new}.", 1)] = value
    return kept
