"""The policy of the dynamic tree, on invented distributions."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.tree import DraftTree
from drafter_svc.tree_builder import ROOT, GrowingTree, best_tree, forwarded_at_most

VOCAB = 24


def grow(
    seed: int, nodes: int, top_k: int, depth: int, sharpness: float
) -> tuple[DraftTree, list[tuple[int, int, float]], list[list[int]]]:
    """A tree, all its candidates (token, parent, score; kept here on our own) and the path that
    each frontier node's mask spells, level by level."""
    noise = np.random.default_rng(seed)
    tree = GrowingTree(nodes, top_k, depth)
    candidates: list[tuple[int, int, float]] = []
    frontier, above = [ROOT], [0.0]
    forwarded: list[int] = []
    paths: list[list[int]] = []
    while frontier:
        logits = (noise.normal(size=(len(frontier), VOCAB)) * sharpness).astype(np.float32)
        log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        tokens = np.argsort(-log_probs, axis=1, kind="stable")[:, :top_k]
        best = np.take_along_axis(log_probs, tokens, axis=1)
        first = len(candidates)
        for row, parent in enumerate(frontier):
            for column in range(tokens.shape[1]):
                score = np.float32(above[row]) + np.minimum(best[row, column], np.float32(0))
                candidates.append((int(tokens[row, column]), parent, float(score)))
        grown = tree.extend(tokens, best)
        children = {
            (candidate[1], candidate[0]): index
            for index, candidate in enumerate(candidates)
            if index >= first
        }
        frontier = [
            children[frontier[parent], token]
            for parent, token in zip(grown.parents.tolist(), grown.tokens.tolist(), strict=True)
        ]
        forwarded += frontier
        above = [candidates[node][2] for node in frontier]
        for mask in grown.masks.view(np.uint64).tolist():
            paths.append([node for bit, node in enumerate(forwarded) if mask >> bit & 1])
    return tree.finished(), candidates, paths


shapes = given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 63),
    shape=st.sampled_from([(1, 12), (4, 5), (8, 6), (8, 9), (16, 5), (3, 1)]),
    sharpness=st.sampled_from([0.0, 1.0, 6.0, 40.0]),
)


@settings(deadline=None)
@shapes
def test_the_tree_keeps_the_contract_of_the_wire(
    seed: int, nodes: int, shape: tuple[int, int], sharpness: float
) -> None:
    tree, _, _ = grow(seed, nodes, *shape, sharpness)
    # Parents before children, no duplicate sibling, no score above the parent's, at most 64 rows.
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, VOCAB) == tree
    assert max(tree.depths()) <= shape[1]
    assert len(tree) <= nodes


@settings(deadline=None)
@shapes
def test_the_tree_is_the_n_best_of_all_candidates(
    seed: int, nodes: int, shape: tuple[int, int], sharpness: float
) -> None:
    tree, candidates, _ = grow(seed, nodes, *shape, sharpness)
    expected = sorted((score for _, _, score in candidates), reverse=True)[:nodes]
    assert list(tree.scores) == expected
    assert list(tree.scores) == sorted(tree.scores, reverse=True)


@settings(deadline=None)
@shapes
def test_a_mask_spells_exactly_the_path_to_the_node(
    seed: int, nodes: int, shape: tuple[int, int], sharpness: float
) -> None:
    _, candidates, paths = grow(seed, nodes, *shape, sharpness)
    assert len(paths) <= forwarded_at_most(nodes, *shape) <= 64
    for path in paths:
        *ancestors, node = path
        climbed: list[int] = []
        parent = candidates[node][1]
        while parent != ROOT:
            climbed.append(parent)
            parent = candidates[parent][1]
        assert ancestors == climbed[::-1]


@settings(deadline=None)
@shapes
def test_not_forwarding_hopeless_nodes_loses_nothing(
    seed: int, nodes: int, shape: tuple[int, int], sharpness: float
) -> None:
    """A tree that was grown for 63 nodes, cut down afterwards, is the tree grown for fewer, as
    long as every frontier of the large one is whole."""
    top_k, depth = shape
    distribution = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * sharpness
    log_probs = distribution - np.logaddexp.reduce(distribution, axis=1, keepdims=True)

    def grown(most: int) -> DraftTree:
        """Children depend on the parent's token alone, so that both trees see the same."""
        tree = GrowingTree(most, top_k, depth)
        parents = np.zeros(1, np.int64)
        while len(parents):
            tokens = np.argsort(-log_probs[parents], axis=1, kind="stable")[:, :top_k]
            best = np.take_along_axis(log_probs[parents], tokens, axis=1).astype(np.float32)
            parents = tree.extend(tokens, best).tokens
        return tree.finished()

    assert grown(nodes) == grown(10_000).trimmed(nodes)


def test_a_tree_of_one_node_forwards_nothing() -> None:
    tree = GrowingTree(1, 8, 6)
    frontier = tree.extend(np.array([[3, 1]]), np.array([[-0.5, -1.0]], np.float32))
    assert len(frontier) == 0
    assert tree.finished() == DraftTree((3,), (0,), (-0.5,))


def test_a_log_probability_above_zero_is_taken_as_zero() -> None:
    tree = GrowingTree(4, 1, 2)
    tree.extend(np.array([[3]]), np.array([[1e-6]], np.float32))
    tree.extend(np.array([[5]]), np.array([[1e-6]], np.float32))
    assert tree.finished() == DraftTree((3, 5), (0, 1), (0.0, 0.0))


def test_nan_and_infinite_log_probabilities_are_never_proposed() -> None:
    tree = GrowingTree(8, 4, 1)
    log_probs = np.array([[np.nan, -np.inf, np.inf, -2.0]], np.float32)
    tree.extend(np.array([[1, 2, 3, 4]]), log_probs)
    assert tree.finished() == DraftTree((4,), (0,), (-2.0,))


def test_equal_scores_keep_the_parent_before_its_child() -> None:
    tokens, parents = [7, 7, 7, 8], [ROOT, 0, 1, ROOT]
    assert best_tree(tokens, parents, [0.0, 0.0, 0.0, 0.0], 3) == DraftTree(
        (7, 7, 7), (0, 1, 2), (0.0, 0.0, 0.0)
    )
