"""Drafts with an independent language model of the target's vocabulary (Leviathan et al. 2023,
arXiv 2211.17192), in trees that grow as EAGLE's do. It reads tokens alone."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.decoder import Decoder
from coppice.models.loading import load_target, target_hash
from coppice.tokenizer import Tokenizer
from drafter_svc.drafter import Features
from kernels import ops
from kernels.batch import AttentionBatch, KVCache


class DraftModel:
    """A `DraftNetwork` without features: every token, the root too, has K/V of its own."""

    features = Features.NONE
    hidden_size = 0
    ahead = 0

    def __init__(self, identity: str, decoder: Decoder, vocab_size: int) -> None:
        """`vocab_size`: the target's."""
        self.identity = identity
        self.vocab_size = vocab_size
        self.max_context = decoder.config.max_context
        self.device = decoder.device
        self._decoder = decoder

    def new_cache(self, slots: int) -> KVCache:
        return self._decoder.new_cache(slots)

    def reduce(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, features: Tensor | None, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        # Where the target's vocabulary is padded further than ours, its padding is no word either.
        known = tokens.clamp(max=self._decoder.config.vocab_size - 1)
        return self._decoder.forward(known, cache, batch)

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        logits = self._decoder.logits(hidden)[:, : self.vocab_size].contiguous()
        return ops.best_tokens(logits, min(count, logits.shape[-1]))


def load_draft_model(
    path: Path,
    target: Path,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    quantize: bool = False,
) -> DraftModel:
    """The model in the checkpoint directory `path`, in int8 with `quantize`, for the target in the
    directory `target`, whose config says `vocab_size`. Raises StartError (one line) that names
    both sides of a misfit."""
    check_vocabularies(path, target)
    identity = f"{path.resolve().name}@{target_hash(path)[:12]}"
    return DraftModel(identity, load_target(path, dtype, device, quantize=quantize), vocab_size)


def check_vocabularies(path: Path, target: Path) -> None:
    """Raises StartError unless every id means the same token in both, or none in one of them: some
    checkpoints of a family have a few special tokens more."""
    mine, theirs = (_words(directory) for directory in (path, target))
    for token in sorted(mine.keys() & theirs.keys()):
        if mine[token] != theirs[token]:
            raise StartError(
                f"draft model {path}: token {token} is {mine[token]!r}, in the target {target} it "
                f"is {theirs[token]!r}: set speculation.draft_model to one of the same tokenizer"
            )


def _words(directory: Path) -> Mapping[int, str]:
    return {token: word for word, token in Tokenizer.load(directory).vocabulary().items()}
