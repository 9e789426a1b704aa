"""Our decoder computes what transformers computes, for every family and every kind of rope."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coppice.models.decoder import Decoder
from coppice.models.loading import load_target
from kernels.batch import AttentionBatch, Segment

CPU = torch.device("cpu")
TOLERANCE = 1e-4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama, one key per query head": ("llama", {"num_key_value_heads": 4}),
    "llama, head_dim apart": ("llama", {"head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window of the context": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
}


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(
    family: str, published: Any, prefill: Any
) -> None:
    model_type, settings = FAMILIES[family]
    directory, model = published(model_type, **settings)
    decoder = load_target(directory, torch.float32, CPU)
    tokens = torch.randint(0, 97, (40,))
    expected = logits_of(model, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(prefill(decoder, tokens, 40), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_a_rope_kind_gives_the_logits_of_transformers(
    rope: str, published: Any, prefill: Any
) -> None:
    directory, model = published("llama", rope_parameters={"rope_theta": 500.0, **ROPES[rope]})
    decoder = load_target(directory, torch.float32, CPU)
    tokens = torch.randint(0, 97, (64,))
    expected = logits_of(model, tokens)
    torch.testing.assert_close(prefill(decoder, tokens, 64), expected, atol=TOLERANCE, rtol=0)


def test_dynamic_rope_is_frozen_at_the_maximum_context(published: Any, prefill: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    directory, model = published("llama", rope_parameters=rope)
    decoder = load_target(directory, torch.float32, CPU, max_context=100)
    tokens = torch.randint(0, 97, (100,))
    # transformers takes the angles of the sequence's own length, here the whole context.
    expected = logits_of(model, tokens)
    torch.testing.assert_close(prefill(decoder, tokens, 100), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        prefill(decoder, tokens[:50], 50), prefill(decoder, tokens, 100)[:50]
    )


@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(
    chunk: int, published: Any, prefill: Any
) -> None:
    directory, model = published("qwen3", head_dim=16)
    decoder = load_target(directory, torch.float32, CPU)
    tokens = torch.randint(0, 97, (40,))
    expected = logits_of(model, tokens)
    torch.testing.assert_close(prefill(decoder, tokens, chunk), expected, atol=TOLERANCE, rtol=0)


def tree_logits(decoder: Decoder, prompt: Tensor, tokens: Tensor, parents: list[int]) -> Tensor:
    """Logits of tree rows below a prompt; parents[row] is a row, the root's is itself."""
    length, rows = len(prompt), len(tokens)
    cache = decoder.new_cache(3 * (length + rows))
    slots = torch.randperm(3 * (length + rows))[: length + rows]
    context, tail = slots[:length], slots[length:]
    causal = Segment(length, context[:0], context, None)
    decoder.forward(prompt, cache, AttentionBatch(context, torch.arange(length), (causal,)))
    masks, depths = [1], [0]
    for row in range(1, rows):
        masks.append(masks[parents[row]] | 1 << row)
        depths.append(depths[parents[row]] + 1)
    tree = Segment(rows, context, tail, torch.tensor(masks))
    batch = AttentionBatch(tail, length + torch.tensor(depths), (tree,))
    return decoder.logits(decoder.forward(tokens, cache, batch))


def test_each_row_of_a_tree_equals_its_own_path_run_alone(published: Any) -> None:
    directory, model = published("llama")
    decoder = load_target(directory, torch.float32, CPU)
    prompt = torch.randint(0, 97, (11,))
    tokens = torch.randint(0, 97, (8,))
    parents = [0, 0, 0, 1, 1, 2, 4, 6]
    found = tree_logits(decoder, prompt, tokens, parents)
    for row in range(8):
        path = [row]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        expected = logits_of(model, torch.cat((prompt, tokens[path])))[-1]
        torch.testing.assert_close(found[row], expected, atol=TOLERANCE, rtol=0)


def test_sequences_in_one_batch_do_not_see_each_other(published: Any) -> None:
    directory, model = published("qwen2")
    decoder = load_target(directory, torch.float32, CPU)
    first, second = torch.randint(0, 97, (9,)), torch.randint(0, 97, (14,))
    slots = torch.randperm(40)[:23]
    empty = slots[:0]
    segments = (Segment(9, empty, slots[:9], None), Segment(14, empty, slots[9:], None))
    positions = torch.cat((torch.arange(9), torch.arange(14)))
    batch = AttentionBatch(slots, positions, segments)
    features = decoder.forward(torch.cat((first, second)), decoder.new_cache(40), batch)
    expected = torch.cat((logits_of(model, first), logits_of(model, second)))
    torch.testing.assert_close(decoder.logits(features), expected, atol=TOLERANCE, rtol=0)


def test_a_model_in_bfloat16_gives_float32_logits_near_the_exact_ones(
    published: Any, prefill: Any
) -> None:
    directory, model = published("llama")
    decoder = load_target(directory, torch.bfloat16, CPU)
    tokens = torch.randint(0, 97, (20,))
    found = prefill(decoder, tokens, 20)
    expected = logits_of(model, tokens)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.05 * expected.norm()
