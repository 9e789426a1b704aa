"""Trees of an EAGLE-3 head against a slow drafter, and positions that no head was trained for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, FeatureRows, Features
from drafter_svc.eagle import EagleNetwork
from drafter_svc.growing import GrowingDrafter
from drafter_svc.tree_builder import DynamicPolicy
from kernels.batch import AttentionBatch, Segment

MakeHead = Callable[..., Any]


def story(seed: int, length: int, width: int = 96) -> tuple[list[int], Tensor]:
    """Random committed tokens and the features of all of them but the root."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (length,), generator=noise).tolist()
    return tokens, torch.randn(length - 1, width, generator=noise) * 2


def drafter_of(tiny: Any, top_k: int, depth: int, kv_slots: int = 256) -> GrowingDrafter:
    return GrowingDrafter(EagleNetwork(tiny.head), kv_slots, DynamicPolicy(top_k, depth))


def assert_same(tree: DraftTree, expected: Any) -> None:
    assert list(tree.tokens) == expected.tokens
    assert list(tree.parents) == expected.parents
    assert list(tree.scores) == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"), [(1, 1, 1), (4, 1, 5), (15, 4, 6), (63, 8, 6), (63, 16, 5)]
)
def test_a_tree_equals_the_slow_reference(
    make_tiny_eagle3_head: MakeHead, seed: int, nodes: int, top_k: int, depth: int
) -> None:
    tiny = make_tiny_eagle3_head(seed)
    tokens, features = story(seed, 5 + 3 * seed)
    drafter = drafter_of(tiny, top_k, depth)
    [tree] = drafter.propose([DraftRequest("s", tokens, nodes, FeatureRows(0, features))])
    assert_same(tree, tiny.reference.tree(tokens, features, nodes, top_k, depth))
    assert {token % 3 for token in tree.tokens} == {1}  # of the draft vocabulary
    drafter.check_integrity()


def test_a_session_that_grows_sends_only_new_features_and_drafts_the_same(
    make_tiny_eagle3_head: MakeHead,
) -> None:
    tiny = make_tiny_eagle3_head(4)
    tokens, features = story(4, 40)
    drafter = drafter_of(tiny, 4, 4)
    known = 0
    for length in (5, 6, 9, 40):
        assert drafter.features_needed("s", tokens[:length]) == known
        given = FeatureRows(known, features[known : length - 1].bfloat16())
        [tree] = drafter.propose([DraftRequest("s", tokens[:length], 12, given)])
        rounded = features.bfloat16().float()  # as a verifier in bf16 sends them
        assert_same(tree, tiny.reference.tree(tokens[:length], rounded, 12, 4, 4))
        known = length - 1


def test_it_reads_the_inputs_of_three_layers_and_nothing_narrower(
    make_tiny_eagle3_head: MakeHead,
) -> None:
    drafter = drafter_of(make_tiny_eagle3_head(), 4, 4)
    assert drafter.features == Features(layers=(2, 3, 3))
    assert (drafter.hidden_size, drafter.features.width(drafter.hidden_size)) == (32, 96)
    tokens, final = story(5, 10, width=32)
    request = DraftRequest("s", tokens, 9, FeatureRows(0, final))
    assert drafter.propose([request]) == [DraftTree()]


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["make_tiny_head", "make_tiny_eagle3_head"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_far_beyond_the_heads_context_only_distances_count(
    request: pytest.FixtureRequest, kind: str, rope: dict[str, object]
) -> None:
    make: MakeHead = request.getfixturevalue(kind)
    rotary = {"rope_theta": 1000.0, **rope}
    head = make(max_position_embeddings=64, rope_parameters=rotary).head
    tokens, features = story(1, 21, width=32)
    predicted: list[Tensor] = []
    for start in (0, 5000):
        cache, slots = head.new_cache(20), torch.arange(20)
        segment = Segment(20, slots[:0], slots, None)
        batch = AttentionBatch(slots, torch.arange(start, start + 20), (segment,))
        predicted.append(head.forward(torch.tensor(tokens[1:]), features, cache, batch))
    # fp32 angles of about 5000 are known to 5e-4.
    torch.testing.assert_close(predicted[1], predicted[0], atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(("kind", "width"), [("make_tiny_head", 32), ("make_tiny_eagle3_head", 96)])
def test_a_session_longer_than_the_published_2048_positions_is_drafted(
    request: pytest.FixtureRequest, kind: str, width: int
) -> None:
    tiny = request.getfixturevalue(kind)(max_position_embeddings=2048)
    drafter = drafter_of(tiny, 4, 4, kv_slots=4096)
    tokens, features = story(2, 2100, width)
    for length in (2046, 2050, 2100):
        given = FeatureRows(0, features[: length - 1])
        [tree] = drafter.propose([DraftRequest("s", tokens[:length], 15, given)])
        assert len(tree) == 15
    drafter.check_integrity()
