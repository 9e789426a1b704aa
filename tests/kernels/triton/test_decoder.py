"""A whole decoder over the Triton kernels, as `kernels.ops` strings them together."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import Decoder, DecoderWeights
from coppice.models.rope import rotary_table
from kernels import ops
from kernels.batch import AttentionBatch, Segment
from kernels.layer import LayerWeights
from kernels.triton.backend import TritonBackend

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 61, 32, 48, 2, 1, 16


@pytest.fixture
def model(backend: TritonBackend, device: torch.device) -> Iterator[Decoder]:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * 2 * shape[-1] ** -0.5).bfloat16()

    layer = LayerWeights(
        random(HIDDEN), random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), None, random(DIM),
        random(DIM), random(HIDDEN, HEADS * DIM), random(HIDDEN), random(HIDDEN),
        random(2 * INNER, HIDDEN), None, random(HIDDEN, INNER), None,
    )  # fmt: skip
    config = DecoderConfig(
        "llama", VOCAB, HIDDEN, INNER, 1, HEADS, KV_HEADS, DIM, 1e-5, RopeConfig(), 512
    )
    weights = DecoderWeights(random(VOCAB, HIDDEN), (layer,), random(HIDDEN), random(VOCAB, HIDDEN))
    with ops.use_backend(backend):
        yield Decoder(config, weights, rotary_table(config, device))


def plain(model: Decoder, tokens: Tensor, length: int) -> Tensor:
    """Logits of all positions from `length` on: a prefill, then single steps."""
    slots = torch.arange(len(tokens), device=model.device)
    cache, logits = model.new_cache(len(tokens)), []
    for start, stop in ((0, length), *((i, i + 1) for i in range(length, len(tokens)))):
        own = slots[start:stop]
        masks = None if start == 0 else torch.ones(1, dtype=torch.int64, device=model.device)
        batch = AttentionBatch(own, own, (Segment(stop - start, slots[:start], own, masks),))
        logits.append(model.logits(model.forward(tokens[start:stop], cache, batch)))
    return torch.cat(logits[1:])


@torch.inference_mode()
def test_a_tree_step_is_bit_equal_to_plain_steps(model: Decoder) -> None:
    device = model.device
    tokens, drafted = (torch.randint(0, VOCAB, (n,), device=device) for n in (20, 4))
    ways = [[0], [0, 1], [0, 2], [0, 2, 3]]
    slots = torch.randperm(30, device=device)
    context, own = slots[:20], slots[20:24]
    masks = torch.tensor([sum(1 << node for node in way) for way in ways], device=device)
    positions = torch.tensor([19 + len(way) for way in ways], device=device)
    cache = model.new_cache(30)
    prefill = Segment(20, slots[:0], context, None)
    model.forward(
        tokens, cache, AttentionBatch(context, torch.arange(20, device=device), (prefill,))
    )
    tree = AttentionBatch(own, positions, (Segment(4, context, own, masks),))
    logits = model.logits(model.forward(drafted, cache, tree))
    alone = plain(model, torch.cat((tokens, drafted[[0, 2, 3]])), 20)
    assert torch.equal(logits[[0, 2, 3]], alone)


@torch.inference_mode()
def test_it_agrees_with_plain_torch(model: Decoder) -> None:
    assert ops.describe(model.device).startswith("triton")
    tokens = torch.randint(0, VOCAB, (12,), device=model.device)
    ours = plain(model, tokens, 10)
    with ops.use_backend(None):
        assert ops.describe(model.device) == "torch"
        expected = plain(model, tokens, 10)
    torch.testing.assert_close(ours, expected, atol=0.1, rtol=0.05)


def test_gradients_are_torchs(model: Decoder) -> None:
    x = torch.randn((3, HIDDEN), device=model.device).bfloat16().requires_grad_()
    ops.linear(x, model.weights.layers[0].qkv).sum().backward()
    assert x.grad is not None
