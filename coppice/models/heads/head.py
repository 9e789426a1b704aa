"""What a draft head computes: one decoder layer over pairs of a token and a feature.

The pair of token x_{t+1} and feature f_t sits at position t; the layer predicts f_{t+1}, and an LM
head turns that into the distribution of x_{t+2}. EAGLE-1/2 (Li et al. 2024, arXiv 2401.15077 and
2406.16858) reads the target's final feature, EAGLE-3 (Li et al. 2025, arXiv 2503.01840) the inputs
of three of its layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig
from coppice.models.decoder import (
    LayerWeights,
    RotaryTable,
    after_attention,
    attention,
    decoder_layers,
    new_cache,
)
from kernels import ops
from kernels.batch import AttentionBatch, KVCache
from kernels.packed import Weight


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead(ABC):
    """Weights of a head together with the target's tensors that it borrows.

    What is called a feature here is [hidden]: the one that a position hands on to the next. The
    target's features become such by `reduce`.
    """

    identity: str  # for logs and refusals
    config: DecoderConfig  # the head's own; its `max_context` is what it was trained for
    target_hidden_size: int
    feature_layers: tuple[int, ...]  # of the target, whose inputs it reads; none: its final feature
    embedding: Tensor  # [vocab, hidden]
    lm_head: Weight  # [draft_vocab, hidden]
    token_map: Tensor | None  # [draft_vocab] int64 target ids; None: all of the vocabulary
    fc: Weight  # [hidden, inputs]
    layer: LayerWeights
    rotary: RotaryTable

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, slots: int) -> KVCache:
        return new_cache(self.config, slots, self.dtype, self.device)

    @abstractmethod
    def reduce(self, features: Tensor) -> Tensor:
        """Features [rows, hidden] of the target's [rows, target_hidden * vectors]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Predicted features [rows, hidden] for pairs of tokens [rows] and features [rows,
        hidden]; K/V go into `cache`."""

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, draft_vocab] in fp32 of features [rows, hidden]."""

    def best_tokens(self, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest next tokens of features [rows, hidden]: target ids and
        log-probabilities (fp32, over the draft vocabulary), both [rows, min(count, draft_vocab)]
        and likeliest first."""
        logits = self.logits(features)  # [rows, draft_vocab]
        tokens, log_probs = ops.best_tokens(logits, min(count, logits.shape[-1]))
        return (tokens if self.token_map is None else self.token_map[tokens]), log_probs


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead(DraftHead):
    """EAGLE-1/2: `fc` [hidden, 2 * hidden] fuses the pair for an ordinary layer."""

    fc_bias: Tensor | None  # [hidden]

    def reduce(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        pairs = torch.cat((self.embedding[tokens], features), -1)  # [rows, 2 * hidden]
        hidden = ops.linear(pairs, self.fc, self.fc_bias)
        angles = self.rotary(batch.positions)
        return decoder_layers(hidden, (self.layer,), self.config, angles, cache, batch)

    def logits(self, features: Tensor) -> Tensor:
        return ops.linear(features, self.lm_head, wide=True)


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Head(DraftHead):
    """EAGLE-3: `fc` [hidden, 3 * target_hidden] fuses the target's features; q, k and v of the
    layer read the pair itself, [2 * hidden]."""

    embedding_norm: Tensor  # [hidden]
    feature_norm: Tensor  # [hidden]
    output_norm: Tensor  # [hidden], before the LM head; the next position gets what was before it
    residual_is_normed: bool  # what the layer adds to: the feature after its norm, or before

    def reduce(self, features: Tensor) -> Tensor:
        return ops.linear(features, self.fc)

    def forward(
        self, tokens: Tensor, features: Tensor, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        embedded = ops.rms_norm(self.embedding[tokens], self.embedding_norm, eps)
        normed = ops.rms_norm(features, self.feature_norm, eps)
        pairs = torch.cat((embedded, normed), -1)  # [rows, 2 * hidden]
        angles = self.rotary(batch.positions)
        mixed = attention(pairs, self.layer, self.config, angles, cache, 0, batch)
        residual = normed if self.residual_is_normed else features
        return after_attention(mixed, residual, self.layer, self.config)

    def logits(self, features: Tensor) -> Tensor:
        normed = ops.rms_norm(features, self.output_norm, self.config.rms_norm_eps)
        return ops.linear(normed, self.lm_head, wide=True)
