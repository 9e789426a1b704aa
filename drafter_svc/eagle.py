"""Drafts with a head of the EAGLE family: a network for `growing.py`."""

from torch import Tensor

from coppice.models.heads.head import DraftHead
from drafter_svc.drafter import Features
from kernels.batch import AttentionBatch, KVCache


class EagleNetwork:
    """A `DraftNetwork` that is a head of any kind: what differs is how it reads the target."""

    ahead = 1

    def __init__(self, head: DraftHead) -> None:
        layers = head.feature_layers
        self.identity = head.identity
        self.features = Features(layers=layers) if layers else Features.FINAL
        self.hidden_size = head.target_hidden_size
        self.vocab_size = head.config.vocab_size
        self.max_context = head.config.max_context
        self.device = head.device
        self._head = head

    def new_cache(self, slots: int) -> KVCache:
        return self._head.new_cache(slots)

    def reduce(self, features: Tensor) -> Tensor:
        return self._head.reduce(features.to(device=self._head.device, dtype=self._head.dtype))

    def forward(
        self, tokens: Tensor, features: Tensor | None, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        assert features is not None, "a head without features"
        return self._head.forward(tokens, features, cache, batch)

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._head.best_tokens(hidden, count)
