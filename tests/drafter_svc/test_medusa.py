"""Drafting with Medusa heads, against a slow count of all combinations."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from coppice.models.medusa import MedusaHead, MedusaHeads
from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, FeatureRows, Features
from drafter_svc.medusa import MedusaDrafter
from drafter_svc.static_tree import MEDUSA_PATHS, StaticPolicy
from drafter_svc.tree_builder import DynamicPolicy

VOCAB, HIDDEN, HEADS = 12, 8, 4

torch.set_num_threads(1)

Paths = dict[tuple[int, ...], float]


def make_heads(seed: int, heads: int = HEADS) -> MedusaHeads:
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise) * 0.7

    return MedusaHeads(
        "medusa@test",
        HIDDEN,
        VOCAB,
        torch.float32,
        torch.device("cpu"),
        tuple(
            MedusaHead(((random(HIDDEN, HIDDEN), random(HIDDEN)),), random(VOCAB, HIDDEN))
            for _ in range(heads)
        ),
    )


def story(seed: int, length: int) -> tuple[list[int], Tensor]:
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=noise).tolist()
    return tokens, torch.randn(max(length - 1, 0), HIDDEN, generator=noise)


def ranked(heads: MedusaHeads, feature: Tensor) -> list[list[tuple[int, float]]]:
    """For every head, all tokens with their log-probabilities, likeliest first."""
    found: list[list[tuple[int, float]]] = []
    for head in heads.heads:
        [(weight, bias)] = head.blocks
        assert isinstance(weight, Tensor)
        assert isinstance(head.lm_head, Tensor)
        y = weight.double() @ feature.double() + bias.double()
        x = feature.double() + y * torch.sigmoid(y)
        log_probs = (head.lm_head.double() @ x).log_softmax(-1).tolist()
        found.append(sorted(enumerate(log_probs), key=lambda entry: -entry[1]))
    return found


def best(candidates: Paths, nodes: int) -> Paths:
    return dict(sorted(candidates.items(), key=lambda entry: -entry[1])[:nodes])


def slow_static(heads: MedusaHeads, feature: Tensor, nodes: int) -> Paths:
    levels = ranked(heads, feature)
    paths = [
        [levels[depth][rank] for depth, rank in enumerate(ranks)]
        for ranks in MEDUSA_PATHS
        if len(ranks) <= len(levels)
    ]
    return best({tuple(t for t, _ in p): math.fsum(lp for _, lp in p) for p in paths}, nodes)


def slow_dynamic(heads: MedusaHeads, feature: Tensor, nodes: int, top_k: int, depth: int) -> Paths:
    """Of all combinations of each head's best. The beam must hold `top_k` of them per level."""
    levels = [level[:top_k] for level in ranked(heads, feature)[:depth]]
    candidates: Paths = {}
    for length in range(1, len(levels) + 1):
        for path in itertools.product(*levels[:length]):
            candidates[tuple(t for t, _ in path)] = math.fsum(lp for _, lp in path)
    return best(candidates, nodes)


def spelt(tree: DraftTree) -> Paths:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.scores, strict=True))


def assert_same(tree: DraftTree, expected: Paths) -> None:
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, VOCAB) == tree
    found = spelt(tree)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-4)


def request(name: str, tokens: list[int], features: Tensor, budget: int) -> DraftRequest:
    """With the one feature that is asked for."""
    start = len(tokens) - 2
    return DraftRequest(name, tokens, budget, FeatureRows(start, features[start:]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 7, 30, 63])
def test_a_static_tree_holds_the_best_of_the_published_paths(seed: int, nodes: int) -> None:
    heads = make_heads(seed, HEADS - seed % 2)
    tokens, features = story(seed, 9)
    drafter = MedusaDrafter(heads, StaticPolicy(MEDUSA_PATHS))
    [tree] = drafter.propose([request("s", tokens, features, nodes)])
    assert_same(tree, slow_static(heads, features[-1], nodes))


@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"), [(1, 8, 6), (8, 8, 6), (8, 8, 2), (5, 1, 5), (8, 12, 1)]
)
def test_a_dynamic_tree_holds_the_best_of_all_combinations(
    nodes: int, top_k: int, depth: int
) -> None:
    heads = make_heads(nodes)
    tokens, features = story(1, 9)
    drafter = MedusaDrafter(heads, DynamicPolicy(top_k, depth))
    [tree] = drafter.propose([request("s", tokens, features, nodes)])
    assert_same(tree, slow_dynamic(heads, features[-1], nodes, top_k, depth))


def test_a_batch_grows_the_trees_of_single_requests() -> None:
    heads = make_heads(3)
    drafter = MedusaDrafter(heads, StaticPolicy(MEDUSA_PATHS))
    needs = [("a", 2, 15), ("b", 30, 1), ("c", 3, 63), ("d", 9, 0), ("e", 5, 4)]
    stories = {name: story(seed, length) for seed, (name, length, _) in enumerate(needs)}
    trees = drafter.propose([request(name, *stories[name], nodes) for name, _, nodes in needs])
    for (name, _, nodes), tree in zip(needs, trees, strict=True):
        assert_same(tree, slow_static(heads, stories[name][1][-1], nodes))


def test_only_the_feature_before_the_roots_is_read() -> None:
    drafter = MedusaDrafter(make_heads(0), StaticPolicy(MEDUSA_PATHS))
    tokens, features = story(2, 9)
    assert drafter.features is Features.FINAL
    assert drafter.features_needed("s", tokens) == 7
    assert [drafter.features_needed("s", tokens[:n]) for n in (0, 1, 2)] == [0, 0, 0]
    [tree] = drafter.propose([request("s", tokens, features, 9)])
    others = features.clone()
    others[:-1] = torch.nan
    assert drafter.propose([DraftRequest("s", tokens, 9, FeatureRows(0, others))]) == [tree]
    others[-1] += 1.0
    assert drafter.propose([DraftRequest("s", tokens, 9, FeatureRows(0, others))]) != [tree]


def test_missing_features_cost_the_tree_of_that_session_alone() -> None:
    drafter = MedusaDrafter(make_heads(0), StaticPolicy(MEDUSA_PATHS))
    tokens, features = story(8, 10)
    lacking = [
        DraftRequest("none", tokens, 9),
        DraftRequest("early end", tokens, 9, FeatureRows(0, features[:8])),
        DraftRequest("other target", tokens, 9, FeatureRows(0, torch.zeros(9, HIDDEN - 1))),
        DraftRequest("one token", tokens[:1], 9, FeatureRows(0, features[:0])),
        DraftRequest("nan", tokens, 9, FeatureRows(8, torch.full((1, HIDDEN), torch.nan))),
    ]
    *empty, tree = drafter.propose([*lacking, request("whole", tokens, features, 9)])
    assert empty == [DraftTree()] * len(lacking)
    assert_same(tree, slow_static(make_heads(0), features[-1], 9))
    assert drafter.propose(lacking[:1]) == [DraftTree()]


def test_no_head_runs_for_a_level_that_no_tree_reaches() -> None:
    drafter = MedusaDrafter(make_heads(0), StaticPolicy(MEDUSA_PATHS))
    tokens, features = story(3, 9)
    for nodes, levels in ((1, 1), (63, HEADS)):
        drafter.propose([request("s", tokens, features, nodes)])
        assert len(drafter.times.seconds_per_depth) == levels
