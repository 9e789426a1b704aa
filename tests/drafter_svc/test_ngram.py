"""Suffix lookup."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest
from drafter_svc.ngram import LONGEST_SUFFIX, OCCURRENCES, NgramDrafter


def propose(tokens: list[int], budget: int = 8, depth: int = 4) -> DraftTree:
    [tree] = NgramDrafter(10_000, depth).propose([DraftRequest("s", tokens, budget)])
    return tree


def test_what_followed_the_same_words_is_proposed() -> None:
    tree = propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert tree.tokens == (4, 5, 6, 9)
    assert tree.parents == (0, 1, 2, 3)
    assert list(tree.scores) == pytest.approx([math.log(0.5) * n for n in (1, 2, 3, 4)])


def test_the_longest_suffix_decides() -> None:
    assert propose([8, 1, 2, 30, 7, 2, 40, 8, 1, 2], depth=1).tokens == (30,)


def test_several_occurrences_are_merged_and_the_more_frequent_comes_first() -> None:
    tree = propose([1, 5, 6, 1, 5, 7, 1, 8, 9, 1], depth=2)
    assert tree.tokens[:2] == (5, 8)
    words = [0, *tree.tokens]
    nodes = zip(tree.parents, tree.tokens, tree.scores, strict=True)
    found = {(words[parent], token): math.exp(score) for parent, token, score in nodes}
    # Behind a suffix of one token 2 tries, 1 hit, so 2 / 4; of two tokens 1 and 0, so 1 / 3.
    five, eight = 2 / 3 * 2 / 4, 1 / 3 * 2 / 4
    six_or_seven, nine = five * 1 / 2 * 1 / 3, eight * 1 / 3
    assert found == pytest.approx(
        {(0, 5): five, (0, 8): eight, (5, 6): six_or_seven, (5, 7): six_or_seven, (8, 9): nine}
    )


def test_text_without_repetition_proposes_nothing() -> None:
    assert propose(list(range(20))) == DraftTree()
    assert propose([]) == DraftTree()
    assert propose([1, 1, 1], budget=0) == DraftTree()


def reference_continuations(tokens: list[int]) -> list[int]:
    """Positions behind all earlier occurrences of the longest repeated suffix, by plain search."""
    for n in range(min(LONGEST_SUFFIX, len(tokens)), 0, -1):
        suffix = tokens[-n:]
        found = [i for i in range(n, len(tokens)) if tokens[i - n : i] == suffix]
        if found:
            return found[-OCCURRENCES:]
    return []


texts = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@given(tokens=texts, budget=st.integers(1, 63), depth=st.integers(1, 12))
def test_every_path_was_seen_and_the_tree_keeps_the_contract(
    tokens: list[int], budget: int, depth: int
) -> None:
    tree = propose(tokens, budget, depth)
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, 5) == tree
    assert len(tree) <= budget
    assert max(tree.depths()) <= depth
    starts = reference_continuations(tokens)
    assert bool(len(tree)) == bool(starts)
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        path = [*paths[parent], token]
        paths.append(path)
        assert any(tokens[start : start + len(path)] == path for start in starts)


def reference_hit_rate(tokens: list[int], length: int) -> float:
    """Over all beginnings of the text, by plain search."""
    tried = foretold = 0
    for end in range(1, len(tokens)):
        text = tokens[:end]
        for n in range(min(LONGEST_SUFFIX, end), 0, -1):
            found = [i for i in range(n, end) if text[i - n : i] == text[end - n :]]
            if found:
                followers = [text[i] for i in found[-OCCURRENCES:]]
                tried += n == length
                foretold += n == length and tokens[end] in followers
                break
    return (foretold + 1) / (tried + 2)


@given(tokens=texts)
def test_the_root_s_children_score_their_frequency_times_the_hit_rate(tokens: list[int]) -> None:
    starts = reference_continuations(tokens)
    suffix = max(
        (
            n
            for n in range(1, LONGEST_SUFFIX + 1)
            for i in starts
            if tokens[i - n : i] == tokens[-n:]
        ),
        default=0,
    )
    tree = propose(tokens, budget=63, depth=1)
    followers = [tokens[start] for start in starts]
    for token, score in zip(tree.tokens, tree.scores, strict=True):
        frequency = followers.count(token) / len(followers)
        assert score == pytest.approx(math.log(frequency * reference_hit_rate(tokens, suffix)))


@given(tokens=texts, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_an_index_that_grows_or_is_rolled_back_proposes_the_same(
    tokens: list[int], cuts: list[int]
) -> None:
    drafter = NgramDrafter(10_000, 4)
    for cut in cuts:
        drafter.propose([DraftRequest("s", tokens[:cut], 8)])
    assert drafter.propose([DraftRequest("s", tokens, 8)]) == [propose(tokens)]


def test_the_least_recently_used_sessions_make_room() -> None:
    drafter = NgramDrafter(100, 4)
    for name in ("a", "b", "a", "c"):
        drafter.propose([DraftRequest(name, [1, 2] * 20, 8)])
    assert drafter.indexed == 80
    drafter.forget("a")
    assert drafter.indexed == 40


def test_a_session_longer_than_the_bound_still_finds_its_beginning() -> None:
    tokens = [90, 91, 92, 93, *range(40), 90, 91]
    drafter = NgramDrafter(20, 2)
    [tree] = drafter.propose([DraftRequest("s", tokens, 8)])
    assert tree.tokens == (92, 93)
    assert drafter.indexed <= 20


def test_a_long_text_can_be_looked_at_in_parts() -> None:
    tokens = [i * i % 97 for i in range(300)]
    drafter = NgramDrafter(10_000, 4)
    while (needed := drafter.features_needed("s", tokens)) < len(tokens) - 1:
        part = tokens[: needed + 50]
        assert drafter.propose([DraftRequest("s", part, budget=0)]) == [DraftTree()]
        assert drafter.features_needed("s", tokens) > needed, "nothing was learnt of it"
    assert drafter.propose([DraftRequest("s", tokens, 8)]) == [propose(tokens)]
