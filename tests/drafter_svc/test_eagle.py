"""The EAGLE-2 drafter against a slow one, and its cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import coppice
from coppice.models.heads.head import DraftHead
from coppice.models.heads.loading import load_head
from coppice.models.loading import read_config
from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, FeatureRows
from drafter_svc.eagle import EagleNetwork
from drafter_svc.growing import GrowingDrafter
from drafter_svc.tree_builder import DynamicPolicy

MakeHead = Callable[..., Any]


def story(seed: int, length: int, vocab: int = 60, hidden: int = 32) -> tuple[list[int], Tensor]:
    """Random committed tokens and the features of all of them but the root."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (length,), generator=noise).tolist()
    return tokens, torch.randn(length - 1, hidden, generator=noise) * 2


def eagle_drafter(head: DraftHead, kv_slots: int, top_k: int, depth: int) -> GrowingDrafter:
    return GrowingDrafter(EagleNetwork(head), kv_slots, DynamicPolicy(top_k, depth))


def request(
    name: str, tokens: list[int], features: Tensor, budget: int, start: int = 0
) -> DraftRequest:
    return DraftRequest(name, tokens, budget, FeatureRows(start, features[start:]))


def assert_same(tree: DraftTree, expected: Any) -> None:
    assert list(tree.tokens) == expected.tokens
    assert list(tree.parents) == expected.parents
    assert list(tree.scores) == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"),
    [(1, 1, 1), (1, 8, 6), (4, 1, 5), (15, 4, 6), (20, 8, 3), (63, 8, 6), (63, 16, 5)],
)
def test_a_tree_equals_the_slow_reference(
    make_tiny_head: MakeHead, seed: int, nodes: int, top_k: int, depth: int
) -> None:
    tiny = make_tiny_head(seed, bias=seed % 2 == 0)
    tokens, features = story(seed, 5 + 3 * seed)
    drafter = eagle_drafter(tiny.head, 256, top_k, depth)
    [tree] = drafter.propose([request("s", tokens, features, nodes)])
    assert_same(tree, tiny.reference.tree(tokens, features, nodes, top_k, depth))
    drafter.check_integrity()


def test_the_shipped_head_grows_the_tree_of_the_slow_reference(make_tiny_head: MakeHead) -> None:
    directory = Path(coppice.__file__).parent / "data" / "eagle2-smollm2-135m"
    noise = torch.Generator().manual_seed(0)
    embedding = torch.randn(49152, 576, generator=noise) * 0.12
    config = read_config(directory)
    head = load_head(directory, config, embedding, embedding, torch.float32, torch.device("cpu"))
    reference = type(make_tiny_head().reference)(directory, embedding, embedding)
    tokens, features = story(1, 12, 49152, 576)
    [tree] = eagle_drafter(head, 256, 4, 4).propose([request("s", tokens, features, 24)])
    assert_same(tree, reference.tree(tokens, features, 24, 4, 4))


def test_a_batch_of_different_needs_grows_the_trees_of_single_requests(
    make_tiny_head: MakeHead,
) -> None:
    tiny = make_tiny_head(3)
    drafter = eagle_drafter(tiny.head, 1024, 4, 6)
    needs = [("a", 4, 15), ("b", 30, 3), ("c", 2, 63), ("d", 9, 1), ("e", 400, 7)]
    stories = {name: story(seed, length) for seed, (name, length, _) in enumerate(needs)}
    trees = drafter.propose([request(name, *stories[name], budget) for name, _, budget in needs])
    for (name, _, budget), tree in zip(needs, trees, strict=True):
        assert_same(tree, tiny.reference.tree(*stories[name], budget, 4, 6))
    drafter.check_integrity()


def test_a_session_that_grows_sends_only_new_features_and_drafts_the_same(
    make_tiny_head: MakeHead,
) -> None:
    tiny = make_tiny_head(4)
    tokens, features = story(4, 40)
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    known = 0
    for length in (5, 6, 9, 40):
        assert drafter.features_needed("s", tokens[:length]) == known
        part = request("s", tokens[:length], features[: length - 1], 12, start=known)
        [tree] = drafter.propose([part])
        assert_same(tree, tiny.reference.tree(tokens[:length], features, 12, 4, 4))
        known = length - 1


def test_the_same_request_again_needs_no_features(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    tokens, features = story(5, 10)
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    [first] = drafter.propose([request("s", tokens, features, 9)])
    assert drafter.features_needed("s", tokens) == 9
    [again] = drafter.propose([DraftRequest("s", tokens, 9)])
    assert again == first


def test_other_tokens_roll_the_cache_back_to_the_common_ones(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    tokens, features = story(6, 20)
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    drafter.propose([request("s", tokens, features, 9)])
    other = [*tokens[:12], (tokens[12] + 1) % 60, 7]
    # Pair t holds token t + 1: the first 11 pairs are common.
    assert drafter.features_needed("s", other) == 11
    [tree] = drafter.propose([request("s", other, features[:13], 9, start=11)])
    assert_same(tree, tiny.reference.tree(other, features, 9, 4, 4))
    drafter.check_integrity()


def test_a_shorter_session_runs_its_last_pair_again(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    tokens, features = story(7, 20)
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    drafter.propose([request("s", tokens, features, 9)])
    assert drafter.features_needed("s", tokens[:8]) == 6
    [tree] = drafter.propose([request("s", tokens[:8], features[:7], 9, start=6)])
    assert_same(tree, tiny.reference.tree(tokens[:8], features, 9, 4, 4))
    drafter.check_integrity()


def test_missing_features_cost_the_tree_of_that_session_alone(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    tokens, features = story(8, 10)
    lacking = [
        DraftRequest("none", tokens, 9),
        request("late start", tokens, features, 9, start=1),
        request("early end", tokens, features[:8], 9),
        DraftRequest("other head", tokens, 9, FeatureRows(0, torch.zeros(9, 31))),
        request("one token", tokens[:1], features[:0], 9),
    ]
    *empty, tree = drafter.propose([*lacking, request("whole", tokens, features, 9)])
    assert empty == [DraftTree()] * len(lacking)
    assert len(tree) == 9
    drafter.check_integrity()


def test_without_a_budget_the_features_are_taken_in(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    tokens, features = story(8, 10)
    assert drafter.propose([request("s", tokens, features, 0)]) == [DraftTree()]
    assert drafter.features_needed("s", tokens) == 9
    [tree] = drafter.propose([DraftRequest("s", tokens, 9)])
    assert_same(tree, tiny.reference.tree(tokens, features, 9, 4, 4))


def test_nan_features_propose_nothing_and_spoil_no_neighbour(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    tokens, features = story(9, 10)
    broken = torch.full_like(features, torch.nan)
    bad, good = drafter.propose(
        [request("bad", tokens, broken, 9), request("good", tokens, features, 9)]
    )
    assert bad == DraftTree()
    assert_same(good, tiny.reference.tree(tokens, features, 9, 4, 4))


def test_the_least_recently_used_session_makes_room(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 100, 2, 2)
    tokens, features = story(10, 41)
    for name in ("a", "b"):
        drafter.propose([request(name, tokens, features, 5)])
    drafter.propose([DraftRequest("a", tokens, 5)])
    drafter.propose([request("c", tokens, features, 5)])
    needs = [drafter.features_needed(name, tokens) for name in ("a", "b", "c")]
    assert needs == [40, 0, 40]
    drafter.check_integrity()


def test_sessions_of_one_batch_do_not_evict_each_other(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 64, 2, 2)
    tokens, features = story(11, 41)
    first, second = drafter.propose([request(name, tokens, features, 5) for name in ("a", "b")])
    assert (len(first), len(second)) == (5, 0)
    drafter.check_integrity()


def test_a_session_longer_than_the_pool_gets_an_empty_tree(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 64, 2, 2)
    tokens, features = story(12, 80)
    assert drafter.features_needed("long", tokens) == 79
    assert drafter.propose([request("long", tokens, features, 5)]) == [DraftTree()]
    drafter.check_integrity()


def test_beyond_the_heads_context_only_its_last_part_is_read(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head(max_position_embeddings=64)
    tokens, features = story(13, 700)
    trees: list[DraftTree] = []
    for changed in (0, 600, 680):
        drafter = eagle_drafter(tiny.head, 2048, 4, 4)
        given = features.clone()
        given[:changed] += 1.0
        drafter.propose([request("s", tokens[:690], given[:689], 0)])
        trees += drafter.propose([request("s", tokens, given, 15, start=689)])
    assert len(trees[0]) == 15
    assert trees[1] == trees[0]
    assert trees[2] != trees[0]


def test_a_failing_pass_leaves_no_slot_behind(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    tokens, features = story(14, 10)
    with pytest.raises(IndexError):
        drafter.propose([request("s", [*tokens[:-1], 60_000], features, 9)])
    drafter.check_integrity()
    assert drafter.features_needed("s", tokens) == 0


def test_a_forgotten_session_starts_anew(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 4)
    tokens, features = story(15, 10)
    drafter.propose([request("s", tokens, features, 9)])
    drafter.forget("s")
    drafter.forget("never seen")
    assert drafter.features_needed("s", tokens) == 0
    drafter.check_integrity()


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_slot_is_lost_whatever_sessions_do(
    make_tiny_head: MakeHead, data: st.DataObject
) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 64, 3, 3)
    stories = {name: story(seed, 60) for seed, name in enumerate("abc")}
    for _ in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from("abc"), unique=True))
        batch: list[DraftRequest] = []
        for name in names:
            tokens, features = stories[name]
            length = data.draw(st.integers(1, 60))
            budget = data.draw(st.integers(0, 12))
            batch.append(request(name, tokens[:length], features[: length - 1], budget))
        for wanted, tree in zip(batch, drafter.propose(batch), strict=True):
            assert len(tree) <= wanted.budget
        if data.draw(st.booleans()):
            drafter.forget(data.draw(st.sampled_from("abc")))
        drafter.check_integrity()


def test_the_times_of_every_level_are_reported(make_tiny_head: MakeHead) -> None:
    tiny = make_tiny_head()
    drafter = eagle_drafter(tiny.head, 256, 4, 3)
    tokens, features = story(16, 10)
    drafter.propose([request("s", tokens, features, 20)])
    assert len(drafter.times.seconds_per_depth) == 3
    assert drafter.times.catch_up_seconds > 0
