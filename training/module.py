"""EAGLE heads as torch modules that can be trained, unrolled on their own predictions.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3; HASS, arXiv 2408.15766): after the first
step, which reads the target's features, a head that drafts reads its own. A chain that starts at
position t makes step j at position t + j - 1; there it attends to first-step keys up to t, and to
one key of each of its own steps. All chains of a sequence advance together.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from coppice.models.config import DecoderConfig
from coppice.models.rope import rotary_table

EMBEDDING_SCALE = 16.0  # about rms of features over rms of embeddings
EAGLE3_VECTORS = 3  # of the target that an EAGLE-3 head reads


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of a step, padded at the end. Position t has the pair of token x_{t+1} and feature
    f_t; the pairs whose prediction counts are the `answer` positions, `first` and the ones after.
    """

    start: Tensor  # [sequences] int64: x_0
    tokens: Tensor  # [sequences, positions] int64: x_{t+1}
    features: Tensor  # [sequences, positions, feature_size] fp32: what a head reads for f_t
    first: Tensor  # [sequences] int64: the first position whose prediction counts
    targets: Tensor  # [sequences, answer, hidden] fp32: the final f_{t+1} of the answer positions
    labels: Tensor  # [sequences, answer] int64: x_{t+2}, what the target went on with
    valid: Tensor  # [sequences, answer] bool: not padding

    @property
    def positions(self) -> Tensor:
        """[sequences, answer] int64, clamped into the sequence where they are padding."""
        steps = torch.arange(self.valid.shape[1], device=self.first.device)
        return (self.first[:, None] + steps).clamp_max(self.tokens.shape[1] - 1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Grouped-query attention of answer positions; one K/V per step of the unrolling."""

    def __init__(self, config: DecoderConfig, inputs: int) -> None:
        super().__init__()
        dim = config.head_dim
        self.q_proj = nn.Linear(inputs, config.heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, config.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, config.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden_size, bias=False)
        self._config = config
        self._rotary = rotary_table(config, torch.device("cpu"))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[sequences, heads, rows, head_dim], repeated for the query heads."""
        groups = self._config.heads // self._config.kv_heads
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        k = self._rotated(k, positions)
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: tuple[Tensor, Tensor],
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Of x [sequences, rows, inputs]: `context` are the first step's K/V of all positions,
        `own` those of the later steps, this one's last."""
        q = self._rotated(self._heads(self.q_proj(x)), positions)  # [s, heads, rows, dim]
        q = q * self._config.head_dim**-0.5
        reach = positions - len(own)  # [s, rows]: the last position of the first step
        key_positions = torch.arange(context[0].shape[2], device=x.device)
        hidden = key_positions > reach[:, None, :, None]  # [s, 1, rows, keys]
        scores = [(q @ context[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
        shifted = [
            (_shifted(k, len(own) - step), _shifted(v, len(own) - step))
            for step, (k, v) in enumerate(own, start=1)
        ]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in shifted]
        weights = torch.cat(scores, -1).softmax(-1)
        keys = context[0].shape[2]
        mixed = weights[..., :keys] @ context[1]
        for index, (_, v) in enumerate(shifted):
            mixed = mixed + weights[..., keys + index, None] * v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._config.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [sequences, heads, rows, dim] at positions [sequences, rows]."""
        cos, sin = (part.to(x.device) for part in self._rotary(positions.cpu().flatten()))
        shape = (*positions.shape, cos.shape[-1])
        cos, sin = cos.view(shape)[:, None], sin.view(shape)[:, None]
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _shifted(x: Tensor, rows: int) -> Tensor:
    """x [sequences, heads, rows, dim] with row r in place r + `rows`, zeros before."""
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]]


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Unrolled(nn.Module, ABC):
    """A draft head that predicts the next feature from a token and a feature."""

    def __init__(self, embedding: Tensor) -> None:
        """`embedding` [vocab, hidden] is the target's, and stays as it is."""
        super().__init__()
        self._embedding = [embedding]  # in a list: neither a parameter nor a part of the state

    @property
    @abstractmethod
    def layer(self) -> "Layer": ...

    @abstractmethod
    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what its result is added to, for embeddings of tokens and
        features [..., hidden]."""

    def reduce(self, features: Tensor) -> Tensor:
        """The target's features as the head's own [..., hidden]."""
        return features

    def unroll(self, batch: Batch, steps: int) -> list[Tensor]:
        """Predicted features [sequences, answer, hidden] of each step. Of step j, row r predicts
        the feature after answer position r, for chains that began j - 1 positions earlier: the
        first j - 1 rows have none."""
        attention = self.layer.self_attn
        embedded = self._embedding[0][batch.tokens]
        rows = batch.positions[..., None].expand(-1, -1, embedded.shape[-1])
        answer_embedded = embedded.gather(1, rows)
        everywhere = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        everywhere = everywhere.expand(batch.tokens.shape)
        features = self.reduce(batch.features)
        x, _ = self.enter(embedded, features)
        context = attention.keys_values(x, everywhere)
        features = features.gather(1, rows)
        own: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            x, residual = self.enter(answer_embedded, features)
            if step:
                own.append(attention.keys_values(x, batch.positions))
            hidden = residual + attention(x, batch.positions, context, own)
            hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
            features = F.pad(hidden, (0, 0, 1, 0))[:, :-1]  # the row before's prediction
        return outputs


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, inputs: int) -> None:
        """`inputs` is the size of what attention reads."""
        super().__init__()
        self.self_attn = Attention(config, inputs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)


class EagleModule(Unrolled):
    """An EAGLE-1/2 head, its parameters named as published.

    Embeddings are much smaller than features, so the first columns of `fc` would learn slowly:
    they are trained scaled by EMBEDDING_SCALE, and scaled back where they are stored.
    """

    def __init__(self, config: DecoderConfig, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, config.hidden_size)])

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat((embedded * EMBEDDING_SCALE, features), -1))
        return fused, fused

    def published(self) -> dict[str, Tensor]:
        """The weights under their published names."""
        stored = {name: value.detach() for name, value in self.state_dict().items()}
        return stored | {"fc.weight": _scaled(stored["fc.weight"], EMBEDDING_SCALE)}

    def load_published(self, stored: Mapping[str, Tensor]) -> None:
        own = {name: stored[name].float() for name in self.state_dict()}
        own["fc.weight"] = _scaled(own["fc.weight"], 1.0 / EMBEDDING_SCALE)
        self.load_state_dict(own)


def _scaled(fc: Tensor, scale: float) -> Tensor:
    embedded, features = fc.chunk(2, -1)
    return torch.cat((embedded * scale, features), -1)


class Eagle3Layer(Layer):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Module(Unrolled):
    """An EAGLE-3 head with an LM head of its own, its parameters named as published."""

    def __init__(self, config: DecoderConfig, embedding: Tensor, draft_vocab_size: int) -> None:
        super().__init__(embedding)
        hidden = config.hidden_size
        self.fc = nn.Linear(EAGLE3_VECTORS * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    def reduce(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.midlayer.input_layernorm(embedded)
        return torch.cat((tokens, self.midlayer.hidden_norm(features)), -1), features
