"""A whole decoder over the native backend: decode, trees and prefill agree bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import Decoder, DecoderWeights, RotaryTable, decoder_layer
from kernels import ops
from kernels.batch import AttentionBatch, KVCache, Segment
from kernels.cpu.backend import CpuBackend
from kernels.layer import LayerWeights

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 61, 72, 96, 6, 2, 24
CHUNKS = (1, 7, 64, 100)


def tiny(
    dtype: torch.dtype, biased: bool = True, qk_norm: bool = True, quantize: bool = False
) -> Decoder:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) * 2 * shape[-1] ** -0.5).to(dtype)

    def maybe(present: bool, size: int) -> Tensor | None:
        return torch.randn(size).to(dtype) if present else None

    qkv = (HEADS + 2 * KV_HEADS) * DIM
    layers = tuple(
        LayerWeights(
            torch.rand(HIDDEN).to(dtype), random(qkv, HIDDEN), maybe(biased, qkv),
            maybe(qk_norm, DIM), maybe(qk_norm, DIM), random(HIDDEN, HEADS * DIM),
            maybe(biased, HIDDEN), torch.rand(HIDDEN).to(dtype), random(2 * INNER, HIDDEN),
            maybe(biased, 2 * INNER), random(HIDDEN, INNER), maybe(biased, HIDDEN),
        )
        for _ in range(2)
    )  # fmt: skip
    config = DecoderConfig(
        "llama", VOCAB, HIDDEN, INNER, 2, HEADS, KV_HEADS, DIM, 1e-5, RopeConfig(), 512,
        eos_token_ids=(1,),
    )  # fmt: skip
    rotary = RotaryTable(1000.0 ** (-torch.arange(0, DIM, 2) / DIM), 1.0)
    embedding, norm = torch.randn(VOCAB, HIDDEN).to(dtype), torch.rand(HIDDEN).to(dtype)
    weights = DecoderWeights(embedding, layers, norm, random(VOCAB, HIDDEN))
    return Decoder(config, weights, rotary, quantize)


def in_chunks(model: Decoder, tokens: Tensor, chunk: int) -> tuple[KVCache, Tensor, Tensor]:
    """K/V by position, features and logits of tokens run in chunks over scattered slots."""
    length = len(tokens)
    cache, slots = model.new_cache(length + 9), torch.randperm(length + 9)[:length]
    features: list[Tensor] = []
    for start in range(0, length, chunk):
        own = slots[start : start + chunk]
        positions = torch.arange(start, start + len(own))
        segment = Segment(len(own), slots[:start], own, None)
        batch = AttentionBatch(own, positions, (segment,))
        features.append(model.forward(tokens[start : start + chunk], cache, batch))
    by_position = KVCache(cache.k[:, slots], cache.v[:, slots])
    return by_position, torch.cat(features), torch.cat([model.logits(f) for f in features])


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_prefill_of_decoded_tokens_is_bit_equal(
    chosen: CpuBackend, dtype: torch.dtype, biased: bool, quantize: bool
) -> None:
    model, tokens = tiny(dtype, biased, biased, quantize), torch.randint(0, VOCAB, (100,))
    with torch.inference_mode():
        kv, features, logits = in_chunks(model, tokens, 1)
        for chunk in CHUNKS:
            other_kv, other_features, other_logits = in_chunks(model, tokens, chunk)
            assert torch.equal(other_kv.k, kv.k)
            assert torch.equal(other_kv.v, kv.v)
            assert torch.equal(other_features, features)
            assert torch.equal(other_logits, logits)


@pytest.mark.parametrize("quantize", [False, True])
def test_a_tree_step_is_bit_equal_to_plain_steps(
    chosen: CpuBackend, dtype: torch.dtype, quantize: bool
) -> None:
    model, tokens = tiny(dtype, quantize=quantize), torch.randint(0, VOCAB, (70,))
    ways = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    drafted, slots = torch.randint(0, VOCAB, (6,)), torch.randperm(90)
    context, own = slots[:70], slots[70:76]
    masks = torch.tensor([sum(1 << node for node in way) for way in ways])
    positions = torch.tensor([69 + len(way) for way in ways])
    with torch.inference_mode():
        cache = model.new_cache(90)
        prefill = Segment(70, slots[:0], context, None)
        model.forward(tokens, cache, AttentionBatch(context, torch.arange(70), (prefill,)))
        segment = Segment(6, context, own, masks)
        features = model.forward(drafted, cache, AttentionBatch(own, positions, (segment,)))
        for way in ways:
            _, plain, logits = in_chunks(model, torch.cat((tokens, drafted[way])), 1)
            assert torch.equal(plain[70:], features[way])
            assert torch.equal(logits[70:], model.logits(features)[way])


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("wanted", [(1, 0, 2), (1,), (0, 0), (2, 1)])
def test_inputs_of_layers_change_no_bit_of_the_rest(
    chosen: CpuBackend, dtype: torch.dtype, wanted: tuple[int, ...], quantize: bool
) -> None:
    model, tokens = tiny(dtype, quantize=quantize), torch.randint(0, VOCAB, (40,))
    slots = torch.randperm(50)[:40]
    batch = AttentionBatch(slots, torch.arange(40), (Segment(40, slots[:0], slots, None),))
    angles, layers = model.rotary(batch.positions), model.weights.layers
    with torch.inference_mode():
        plain_cache, cache, other = (model.new_cache(50) for _ in range(3))
        plain = model.forward(tokens, plain_cache, batch)
        features, inputs = model.forward_with_inputs(tokens, cache, batch, wanted)
        steps = [model.weights.embedding[tokens]]
        for index, layer in enumerate(layers):
            steps.append(decoder_layer(steps[-1], layer, model.config, angles, other, index, batch))
    assert torch.equal(features, plain)
    assert torch.equal(cache.k, plain_cache.k)
    assert torch.equal(cache.v, plain_cache.v)
    assert torch.equal(inputs, torch.cat([steps[layer] for layer in wanted], -1))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_a_layer_in_one_call_is_its_operations(
    chosen: CpuBackend, dtype: torch.dtype, with_norm: bool, quantize: bool
) -> None:
    model = tiny(dtype, with_norm, with_norm, quantize)
    assert model.lm_head.dtype == (torch.int8 if quantize else dtype)
    layers = model.weights.layers
    if not with_norm:
        layers = tuple(replace(layer, input_norm=None) for layer in layers)
        layers = tuple(ops.pack_layer(layer, sizes_of(model)) for layer in layers)
    whole = Decoder(model.config, replace(model.weights, layers=layers), model.rotary)
    apart = Decoder(model.config, whole.weights, model.rotary)
    apart.weights = replace(
        whole.weights, layers=tuple(replace(layer, plan=None) for layer in whole.weights.layers)
    )
    tokens = torch.randint(0, VOCAB, (75,))
    with torch.inference_mode():
        torch.manual_seed(1)
        kv, features, logits = in_chunks(whole, tokens, 30)
        torch.manual_seed(1)
        other_kv, other_features, other_logits = in_chunks(apart, tokens, 30)
    assert torch.equal(kv.k, other_kv.k)
    assert torch.equal(kv.v, other_kv.v)
    assert torch.equal(features, other_features)
    assert torch.equal(logits, other_logits)


def sizes_of(model: Decoder) -> ops.LayerSizes:
    config = model.config
    return ops.LayerSizes(config.heads, config.kv_heads, config.head_dim, config.rms_norm_eps)


@pytest.mark.parametrize("quantize", [False, True])
def test_it_agrees_with_plain_torch(chosen: CpuBackend, quantize: bool) -> None:
    model, tokens = tiny(torch.float32, quantize=quantize), torch.randint(0, VOCAB, (80,))
    with torch.inference_mode():
        _, features, logits = in_chunks(model, tokens, 33)
        with ops.use_backend(None):
            assert ops.describe() == "torch"
            _, expected, expected_logits = in_chunks(model, tokens, 33)
    torch.testing.assert_close(features, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)


def test_the_real_model_re_prefills_what_it_decoded(smollm2: Path, dtype: torch.dtype) -> None:
    from coppice.models.loading import load_target

    if not ops.native_backends():
        pytest.skip("the native library is not built")
    model, tokens = load_target(smollm2, dtype, torch.device("cpu")), torch.arange(1000, 1070)
    with torch.inference_mode():
        kv, features, logits = in_chunks(model, tokens, 1)
        for chunk in (9, 70):
            other_kv, other_features, other_logits = in_chunks(model, tokens, chunk)
            assert torch.equal(other_kv.k, kv.k)
            assert torch.equal(other_kv.v, kv.v)
            assert torch.equal(other_features, features)
            assert torch.equal(other_logits, logits)
