"""Which part of a decoder a rank holds, and that it reads no more than that."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from coppice.errors import StartError
from coppice.models import checkpoint
from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import DecoderWeights
from coppice.models.loading import load_weights, read_config
from coppice.models.sharding import Shard, Span, fitting_sizes, shards
from kernels import ops

CPU = torch.device("cpu")


def shape(heads: int, kv_heads: int, inner: int = 1536, vocab: int = 49152) -> DecoderConfig:
    return DecoderConfig(
        "llama", vocab, heads * 8, inner, 2, heads, kv_heads, 8, 1e-5, RopeConfig(), 256
    )


def sizes(spans: list[Span]) -> list[int]:
    return [len(span) for span in spans]


def tiled(spans: list[Span], count: int) -> bool:
    """Whether spans follow each other from 0 to count, none of them empty."""
    ends = all(one.stop == other.start for one, other in pairwise(spans))
    return ends and spans[0].start == 0 and spans[-1].stop == count and min(sizes(spans)) > 0


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 12),
    inner=st.integers(1, 300),
    vocab=st.integers(1, 300),
    ranks=st.integers(1, 40),
)
def test_every_query_head_is_held_once_and_with_its_kv_head(
    kv_heads: int, group: int, inner: int, vocab: int, ranks: int
) -> None:
    config = shape(kv_heads * group, kv_heads, inner, vocab)
    assume(ranks in fitting_sizes(config))
    parts = shards(config, ranks)
    assert tiled([part.heads for part in parts], config.heads)
    assert tiled([part.inner for part in parts], inner)
    assert tiled([part.vocabulary for part in parts], vocab)
    for part in parts:
        own = part.layers_of(config)
        assert own.heads % own.kv_heads == 0
        for head in range(own.heads):
            # What the kernels take for the KV head of this rank's head, by its number in all.
            read = part.kv_heads.start + head // (own.heads // own.kv_heads)
            assert read == (part.heads.start + head) // group


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, [9], [3]), (2, [6, 3], [2, 1]), (3, [3, 3, 3], [1, 1, 1])]
)
def test_groups_of_kv_heads_are_never_split_and_the_first_ranks_hold_more(
    ranks: int, heads: list[int], kv_heads: list[int]
) -> None:
    parts = shards(shape(9, 3), ranks)
    assert sizes([part.heads for part in parts]) == heads
    assert sizes([part.kv_heads for part in parts]) == kv_heads


def test_a_kv_head_is_held_twice_where_there_are_twice_as_many_ranks() -> None:
    parts = shards(shape(8, 2), 4)
    assert [part.kv_heads for part in parts] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2)]
    assert [part.heads.start for part in parts] == [0, 2, 4, 6]


def test_columns_and_rows_are_in_whole_blocks_where_these_divide() -> None:
    parts = shards(shape(9, 3, inner=96, vocab=49152), 2)
    assert sizes([part.inner for part in parts]) == [48, 48]
    assert sizes([part.vocabulary for part in parts]) == [24576, 24576]
    uneven = shards(shape(9, 3, inner=80, vocab=61), 2)
    assert sizes([part.inner for part in uneven]) == [48, 32]
    assert sizes([part.vocabulary for part in uneven]) == [31, 30]


@pytest.mark.parametrize("ranks", [4, 5, 6, 10])
def test_what_does_not_divide_is_refused_with_the_sizes_that_work(ranks: int) -> None:
    with pytest.raises(StartError, match=r"9 query and 3 key-value heads; what fits is 1, 2, 3, 9"):
        shards(shape(9, 3), ranks)


def test_the_sizes_of_a_70b_model() -> None:
    assert fitting_sizes(shape(64, 8)) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)


FAMILIES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("mistral", {"sliding_window": None}),
]


def weights_of(path: Path, shard: Shard | None = None) -> DecoderWeights:
    with ops.use_backend(None):  # as they are, not packed
        return load_weights(path, read_config(path), torch.float32, CPU, shard=shard)


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[name for name, _ in FAMILIES])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shards_of_every_family_are_the_parts_of_the_whole(
    published: Callable[..., tuple[Path, Any]], family: str, settings: Any, ranks: int
) -> None:
    path, _ = published(family, **settings)
    config, whole = read_config(path), weights_of(path)
    dim = config.head_dim
    for part in shards(config, ranks):
        held = weights_of(path, part)
        rows = slice(part.vocabulary.start, part.vocabulary.stop)
        assert torch.equal(held.embedding, whole.embedding[rows])
        assert torch.equal(ops.dense(held.lm_head), ops.dense(whole.lm_head)[rows])
        assert (held.lm_head is held.embedding) == config.tied_embeddings
        heads, kv = part.heads.times(dim), part.kv_heads.times(dim)
        q_size, kv_size = config.heads * dim, config.kv_heads * dim
        qkv = torch.cat(
            [
                torch.arange(heads.start, heads.stop),
                q_size + torch.arange(kv.start, kv.stop),
                q_size + kv_size + torch.arange(kv.start, kv.stop),
            ]
        )
        inner = torch.arange(part.inner.start, part.inner.stop)
        gate_up = torch.cat([inner, config.intermediate_size + inner])
        for own, all_ in zip(held.layers, whole.layers, strict=True):
            assert torch.equal(own.qkv, all_.qkv[qkv])
            assert torch.equal(own.o, all_.o[:, heads.start : heads.stop])
            assert torch.equal(own.gate_up, all_.gate_up[gate_up])
            assert torch.equal(own.down, all_.down[:, inner])
            for name in ("input_norm", "post_norm", "q_norm", "k_norm", "o_bias", "down_bias"):
                assert same(getattr(own, name), getattr(all_, name))
            for name, chosen in (("qkv_bias", qkv), ("gate_up_bias", gate_up)):
                wanted = getattr(all_, name)
                assert same(getattr(own, name), None if wanted is None else wanted[chosen])


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


class Watched:
    """An open safetensors file that notes how many values are read of it."""

    def __init__(self, file: Any, values: dict[str, int]) -> None:
        self.file, self.values = file, values

    def __enter__(self) -> "Watched":
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, name: str) -> Tensor:
        tensor = self.file.get_tensor(name)
        self.values[name] = tensor.numel()
        return tensor

    def get_slice(self, name: str) -> "WatchedSlice":
        return WatchedSlice(self.file.get_slice(name), name, self.values)


class WatchedSlice:
    def __init__(self, stored: Any, name: str, values: dict[str, int]) -> None:
        self.stored, self.name, self.values = stored, name, values

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        part = self.stored[index]
        self.values[self.name] = part.numel()
        return part


def held_values(weights: DecoderWeights) -> int:
    """All that the weights keep in memory, counted by storage and not by view."""
    tensors = [weights.embedding, weights.norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [getattr(layer, name) for name in layer.__slots__ if name != "plan"]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 4
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())


def test_a_rank_reads_and_holds_its_part_alone(
    published: Callable[..., tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = published("llama", intermediate_size=96)
    whole = sum(weight.numel() for weight in model.parameters())
    norms = sum(w.numel() for name, w in model.named_parameters() if "norm" in name)
    values: dict[str, int] = {}
    monkeypatch.setattr(
        checkpoint, "safe_open", lambda *given, **named: Watched(safe_open(*given, **named), values)
    )
    for part in shards(read_config(path), 2):
        values.clear()
        held = held_values(weights_of(path, part))
        assert sum(values.values()) == held
        odd_row = (2 * len(part.vocabulary) - 97) * 48 // 2  # of each of two matrices
        assert held == (whole - norms) // 2 + norms + 2 * odd_row


def test_a_part_of_another_shape_is_named(published: Callable[..., tuple[Path, Any]]) -> None:
    path, _ = published("llama")
    config = replace(read_config(path), intermediate_size=96)
    with pytest.raises(StartError, match=r"gate_proj.weight is \[80, 48\], expected \[96, 48\]"):
        load_weights(path, config, torch.float32, CPU, shard=shards(config, 2)[1])
