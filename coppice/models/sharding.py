"""Which part of a decoder each rank of a tensor-parallel group holds. Pure policy, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from coppice.errors import StartError
from coppice.models.config import DecoderConfig

# Columns of the MLP and rows of the vocabulary are handed out in blocks of so many, where they
# divide: half a block of the native kernels, whose gated product needs whole halves.
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The indices [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, size: int) -> "Span":
        """The same of things that are `size` indices long each."""
        return Span(self.start * size, self.stop * size)


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a stored tensor along one of its dimensions."""

    dim: int  # 0: outputs, 1: inputs
    span: Span

    def shape_of(self, whole: Sequence[int]) -> list[int]:
        return [*whole[: self.dim], len(self.span), *whole[self.dim + 1 :]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. Query heads of a KV head are always together with it."""

    heads: Span  # query heads: outputs of q, inputs of o
    kv_heads: Span  # outputs of k and v
    inner: Span  # outputs of gate and up, inputs of down
    vocabulary: Span  # rows of the embedding and of the LM head

    def layers_of(self, config: DecoderConfig) -> DecoderConfig:
        """The shape of the layers as this rank computes them."""
        return replace(
            config,
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )


def shards(config: DecoderConfig, ranks: int) -> tuple[Shard, ...]:
    """The parts of all ranks, in their order. What does not divide is uneven: the first ranks hold
    one KV head (one block of columns or rows) more. Beyond one rank per KV head several ranks hold
    the same one and share its query heads, if those divide.

    Raises StartError with the sizes that work.
    """
    if not _divides(config, ranks):
        sizes = ", ".join(str(size) for size in fitting_sizes(config))
        raise StartError(
            f"verifier.tensor_parallel = {ranks} does not fit a target of {config.heads} query and "
            f"{config.kv_heads} key-value heads; what fits is {sizes}"
        )
    group = config.heads // config.kv_heads  # query heads of a KV head
    copies = max(1, ranks // config.kv_heads)  # ranks that hold the same KV head
    inner, vocabulary = _blocks(config.intermediate_size, ranks), _blocks(config.vocab_size, ranks)
    parts: list[Shard] = []
    for rank in range(ranks):
        if copies == 1:
            kv_heads = _even(config.kv_heads, ranks)[rank]
            heads = kv_heads.times(group)
        else:
            kv_heads = Span(rank // copies, rank // copies + 1)
            heads = Span(rank * group // copies, (rank + 1) * group // copies)
        parts.append(Shard(heads, kv_heads, inner[rank], vocabulary[rank]))
    return tuple(parts)


def whole(config: DecoderConfig) -> Shard:
    """All of it, as one rank holds it."""
    return shards(config, 1)[0]


def fitting_sizes(config: DecoderConfig) -> tuple[int, ...]:
    """All numbers of ranks that `shards` takes."""
    return tuple(size for size in range(1, config.heads + 1) if _divides(config, size))


def _divides(config: DecoderConfig, ranks: int) -> bool:
    if ranks > min(config.intermediate_size, config.vocab_size):
        return False
    copies, left = divmod(ranks, config.kv_heads)
    if copies == 0 or (copies == 1 and not left):
        return True
    return not left and (config.heads // config.kv_heads) % copies == 0


def _even(count: int, ranks: int) -> list[Span]:
    """[0, count) in order, the first ranks one more than the last."""
    each, more = divmod(count, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [Span(start, stop) for start, stop in pairwise(starts)]


def _blocks(count: int, ranks: int) -> list[Span]:
    """[0, count) in whole blocks, which are as large as leaves one for each."""
    block = gcd(count, BLOCK)
    while count // block < ranks:
        block //= 2
    return [span.times(block) for span in _even(count // block, ranks)]
