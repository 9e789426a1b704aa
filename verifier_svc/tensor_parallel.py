"""One target over several ranks: each holds a shard of every layer and runs the same passes.

Attention and MLP are column-parallel where they begin and row-parallel where they end (Shoeybi et
al. 2019), embedding and LM head are split along the vocabulary. The first rank plans and samples;
the others follow its plans.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from coppice.models.config import DecoderConfig
from coppice.models.decoder import Decoder, DecoderWeights, decoder_layer
from coppice.models.loading import load_weights, read_config
from coppice.models.rope import rotary_table
from coppice.models.sharding import Shard, shards
from kernels import ops
from kernels.batch import AttentionBatch, KVCache
from verifier_svc.plan_words import STOP, decode, encode
from verifier_svc.ranks import Ranks
from verifier_svc.runner import Rows, Runner, scores, tensors

BEAT_SECONDS = 1.0  # between two exchanges of an idle group


class ShardedDecoder(Decoder):
    """One rank's part of the target. Every call is an exchange: all ranks make the same ones."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        parts: Sequence[Shard],
        ranks: Ranks,
        quantize: bool = False,
    ) -> None:
        """`weights` are those of `parts[ranks.rank]`; `config` is the whole target's."""
        own = parts[ranks.rank]
        rotary = rotary_table(config, weights.embedding.device)
        super().__init__(config, weights, rotary, quantize, own.layers_of(config))
        self.ranks = ranks
        self._vocabularies = [part.vocabulary for part in parts]
        self._stops = torch.tensor([v.stop for v in self._vocabularies], device=self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        own = self._vocabularies[self.ranks.rank]
        part = self.weights.embedding[(tokens - own.start).clamp(0, len(own) - 1)]
        owners = torch.bucketize(tokens, self._stops, right=True)
        return _chosen(self.ranks.all_gather(part), owners)

    def run_layers(
        self,
        hidden: Tensor,
        layers: range,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor:
        for layer in layers:
            weights = self.weights.layers[layer]
            hidden = decoder_layer(
                hidden, weights, self.own, angles, cache, layer, batch, self._combine
            )
        return hidden

    def _combine(self, part: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Adds in the order of ranks, in fp32, and rounds once."""
        total, *others = self.ranks.all_gather(part)  # each [rows, hidden] fp32
        for other in others:
            total = total + other
        if bias is not None:
            total = total + bias
        return (total + residual).to(residual.dtype)

    def logits(self, features: Tensor) -> Tensor:
        """As of a whole decoder at the first rank; elsewhere those of the rank's own vocabulary."""
        return self._whole(super().logits(features))

    def scores(self, features: Tensor, greedy: int) -> tuple[Tensor, Tensor]:
        """As of a whole decoder, but logits as `logits` gives them. Of the greedy rows the ranks
        exchange their best and no more."""
        logits = super().logits(features)  # [rows, own vocab]
        others = logits[greedy:]
        return self._best(logits[:greedy]), self._whole(others) if len(others) else others

    def _best(self, logits: Tensor) -> Tensor:
        """Ids [rows] of the largest of all ranks' logits [rows, own vocab]. Of equals the lowest:
        the first rank that has it, as vocabularies are in the order of ranks."""
        if not len(logits):
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        ids = ops.argmax(logits)
        values = logits.gather(1, ids[:, None])[:, 0]
        values = values.where(~values.isnan(), -torch.inf).double()
        ids = ids + self._vocabularies[self.ranks.rank].start
        pairs = self.ranks.all_gather(torch.stack((values, ids.double()), -1))  # [ranks, rows, 2]
        owners = ops.argmax(pairs[:, :, 0].T.float().contiguous())
        return _chosen(pairs[:, :, 1], owners).long()

    def _whole(self, logits: Tensor) -> Tensor:
        widest = max(len(vocabulary) for vocabulary in self._vocabularies)
        parts = self.ranks.gather(functional.pad(logits, (0, widest - logits.shape[-1])))
        if not parts:
            return logits
        own = zip(parts, self._vocabularies, strict=True)
        return torch.cat([part[:, : len(vocabulary)] for part, vocabulary in own], -1)


def _chosen(parts: Tensor, owners: Tensor) -> Tensor:
    """Of parts [ranks, rows, ...], each row of the rank that owns it [rows] -> [rows, ...]."""
    return parts[owners, torch.arange(len(owners), device=owners.device)]


def load_shard(
    path: Path,
    dtype: torch.dtype,
    ranks: Ranks,
    max_context: int | None = None,
    quantize: bool = False,
) -> ShardedDecoder:
    """This rank's part of the target in `path`; of the rest nothing is read. Raises StartError as
    `load_target` does, and with the sizes that work where the target cannot be split so."""
    config = read_config(path, max_context)
    parts = shards(config, ranks.size)
    weights = load_weights(path, config, dtype, ranks.device, quantize, parts[ranks.rank])
    return ShardedDecoder(config, weights, parts, ranks, quantize)


class LeadingRunner(Runner):
    """The first rank's: it has slots, features and answers, and tells the others every pass."""

    def __init__(
        self, model: ShardedDecoder, slots: int, feature_layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(model, slots, feature_layers)
        self._ranks = model.ranks
        self._told = time.monotonic()

    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        self._tell(encode(batch))
        return super().run(batch)

    def idle(self) -> float:
        """Followers must not wait in vain, and one that is gone is noticed here."""
        if time.monotonic() - self._told >= BEAT_SECONDS:
            self._tell(encode(()))
            self._ranks.beat()
        return self._told + BEAT_SECONDS

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a follower that is gone need not be told
            self._tell([STOP])
        self._ranks.leave()

    def _tell(self, words: Sequence[int]) -> None:
        self._ranks.send(words)
        self._told = time.monotonic()


@torch.inference_mode()
def follow(model: ShardedDecoder, slots: int) -> None:
    """Every other rank's loop: runs the first rank's passes until there will be no further one.
    Raises RuntimeError when a rank is gone."""
    cache = model.new_cache(slots)
    while (batch := decode(model.ranks.receive())) is not None:
        if not batch:
            model.ranks.beat()
            continue
        tokens, attention = tensors(batch, model.device)
        scores(model, model.forward(tokens, cache, attention), batch)
