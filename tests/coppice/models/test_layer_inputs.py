"""The inputs of layers are what transformers calls hidden states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coppice.models.loading import load_target
from kernels.batch import AttentionBatch, Segment


@pytest.mark.parametrize("wanted", [(2, 3, 4), (6, 0, 2), (1, 1)])
def test_they_are_transformers_hidden_states(
    published: Callable[..., Any], wanted: tuple[int, ...]
) -> None:
    path, model = published("llama", num_hidden_layers=7)
    tokens = torch.randint(3, 97, (17,))
    states = model(tokens[None], output_hidden_states=True).hidden_states
    decoder = load_target(path, torch.float32, torch.device("cpu"))
    slots = torch.randperm(20)[:17]
    batch = AttentionBatch(slots, torch.arange(17), (Segment(17, slots[:0], slots, None),))
    features, inputs = decoder.forward_with_inputs(tokens, decoder.new_cache(20), batch, wanted)
    expected = torch.cat([states[layer][0] for layer in wanted], -1)
    torch.testing.assert_close(inputs, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(features, states[-1][0], atol=2e-4, rtol=2e-4)
