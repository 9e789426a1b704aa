"""The policy of the static tree, on invented distributions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.tree import DraftTree
from drafter_svc.static_tree import EAGLE_PATHS, MEDUSA_PATHS, RankPath, StaticPolicy

VOCAB = 24
PUBLISHED = {"eagle": EAGLE_PATHS, "medusa": MEDUSA_PATHS}


def children(seed: int, path: tuple[int, ...], sharpness: float) -> list[tuple[int, float]]:
    """An invented distribution below a path of tokens, likeliest first."""
    logits = np.random.default_rng([seed, *path]).normal(size=VOCAB) * sharpness
    log_probs = (logits - np.logaddexp.reduce(logits)).astype(np.float32)
    order = np.argsort(-log_probs, kind="stable")
    return [(int(token), float(log_probs[token])) for token in order]


def grow(
    policy: StaticPolicy, nodes: int, seed: int, sharpness: float
) -> tuple[DraftTree, list[tuple[tuple[int, ...], list[int]]]]:
    """The tree, and each forwarded node's path beside the positions of its mask's bits."""
    tree = policy.new_tree(nodes)
    paths: list[tuple[int, ...]] = [()]
    forwarded: list[tuple[tuple[int, ...], list[int]]] = []
    while paths:
        best = [children(seed, path, sharpness)[: policy.children] for path in paths]
        frontier = tree.extend(
            np.array([[token for token, _ in row] for row in best]),
            np.array([[log_prob for _, log_prob in row] for row in best], np.float32),
        )
        grown = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        paths = [(*paths[parent], token) for parent, token in grown]
        masks = frontier.masks.view(np.uint64).tolist()
        bits = [[bit for bit in range(64) if mask >> bit & 1] for mask in masks]
        forwarded += zip(paths, bits, strict=True)
    return tree.finished(), forwarded


def whole(
    ranks: frozenset[RankPath], seed: int, sharpness: float
) -> dict[tuple[int, ...], np.float32]:
    """Every node of the whole static tree: its path of tokens and its score."""
    tokens: dict[RankPath, tuple[int, ...]] = {(): ()}
    scores: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
    for path in sorted(ranks, key=len):
        above = tokens[path[:-1]]
        token, log_prob = children(seed, above, sharpness)[path[-1]]
        tokens[path] = (*above, token)
        scores[tokens[path]] = scores[above] + np.minimum(np.float32(log_prob), np.float32(0))
    del scores[()]
    return scores


def spelt(tree: DraftTree) -> dict[tuple[int, ...], np.float32]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], map(np.float32, tree.scores), strict=True))


any_tree = given(
    name=st.sampled_from(sorted(PUBLISHED)),
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 63),
    sharpness=st.sampled_from([0.0, 1.0, 6.0]),
)


def test_the_published_trees_have_their_published_sizes() -> None:
    assert [sum(len(path) == n for path in EAGLE_PATHS) for n in range(1, 7)] == [4, 8, 8, 3, 2, 0]
    assert [sum(len(path) == n for path in MEDUSA_PATHS) for n in range(1, 6)] == [10, 28, 23, 2, 0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_with_room_for_all_nodes_the_tree_is_the_whole_one(name: str) -> None:
    tree, _ = grow(StaticPolicy(PUBLISHED[name]), 63, 3, 1.0)
    assert spelt(tree) == whole(PUBLISHED[name], 3, 1.0)


@settings(deadline=None, max_examples=50)
@any_tree
def test_a_smaller_budget_keeps_the_best_connected_nodes(
    name: str, seed: int, nodes: int, sharpness: float
) -> None:
    tree, _ = grow(StaticPolicy(PUBLISHED[name]), nodes, seed, sharpness)
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, VOCAB) == tree
    every, kept = whole(PUBLISHED[name], seed, sharpness), spelt(tree)
    assert len(kept) == min(nodes, len(every))
    assert kept.items() <= every.items()
    assert sorted(kept.values()) == sorted(every.values())[-len(kept) :]


@settings(deadline=None, max_examples=50)
@any_tree
def test_a_mask_spells_exactly_the_path_to_the_node(
    name: str, seed: int, nodes: int, sharpness: float
) -> None:
    policy = StaticPolicy(PUBLISHED[name])
    _, forwarded = grow(policy, nodes, seed, sharpness)
    assert len(forwarded) <= policy.forwarded_at_most(nodes) <= 64
    for path, bits in forwarded:
        assert [forwarded[bit][0] for bit in bits] == [path[:n] for n in range(1, len(path) + 1)]


def test_a_child_that_is_no_number_is_left_out_with_all_below_it() -> None:
    tree = StaticPolicy(frozenset({(0,), (1,), (0, 0), (1, 0)})).new_tree(8)
    frontier = tree.extend(np.array([[5, 6]]), np.array([[np.nan, -1.0]], np.float32))
    assert frontier.tokens.tolist() == [6]
    tree.extend(np.array([[7, 8]]), np.array([[-1.0, -2.0]], np.float32))
    assert tree.finished() == DraftTree((6, 7), (0, 1), (-1.0, -2.0))


def test_a_vocabulary_of_fewer_tokens_than_ranks_is_no_fault() -> None:
    tree = StaticPolicy(frozenset({(0,), (1,), (2,)})).new_tree(8)
    tree.extend(np.array([[5, 6]]), np.array([[-1.0, -2.0]], np.float32))
    assert tree.finished().tokens == (5, 6)


def test_width_and_depth_cut_a_static_tree() -> None:
    assert StaticPolicy(EAGLE_PATHS).within(2, 3).paths == {
        path for path in EAGLE_PATHS if len(path) <= 3 and set(path) <= {0, 1}
    }


def test_a_path_without_its_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match="beginning"):
        StaticPolicy(frozenset({(0,), (1, 0)}))


def test_more_inner_nodes_than_a_mask_has_bits_are_refused() -> None:
    wide = {(rank,) for rank in range(65)} | {(rank, 0) for rank in range(65)}
    deep = {(0,) * n for n in range(1, 6)} | wide
    with pytest.raises(ValueError, match="64"):
        StaticPolicy(frozenset(deep))
