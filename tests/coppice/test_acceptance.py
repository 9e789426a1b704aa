"""Both acceptance rules give exactly the target's distribution: proven by enumeration.

Every random choice is expanded into all of its outcomes with rational probabilities, so the sums
are exact and compared with no tolerance.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest

from coppice.acceptance import rejection_sample, walk
from coppice.tree import DraftTree

Path = tuple[int, ...]


class Unfinished(Exception):
    def __init__(self, outcomes: list[tuple[int, Fraction]]) -> None:
        self.outcomes = outcomes


class Choices:
    """Replays given outcomes, then stops at the first choice that is still open."""

    def __init__(self, taken: Path) -> None:
        self.left = list(taken)

    def choose(self, outcomes: list[tuple[int, Fraction]]) -> int:
        if not self.left:
            raise Unfinished([(value, p) for value, p in outcomes if p > 0])
        return self.left.pop(0)


def enumerate_runs(run: Callable[[Choices], Path]) -> Iterator[tuple[Path, Fraction]]:
    """All results of `run`, each with its exact probability."""
    open_runs: list[tuple[Path, Fraction]] = [((), Fraction(1))]
    while open_runs:
        taken, probability = open_runs.pop()
        try:
            result = run(Choices(taken))
        except Unfinished as choice:
            open_runs += [((*taken, value), probability * p) for value, p in choice.outcomes]
        else:
            yield result, probability


def random_distribution(rng: random.Random, size: int, zeros: bool) -> list[Fraction]:
    weights = [rng.randint(0 if zeros else 1, 5) for _ in range(size)]
    if not any(weights):
        weights[0] = 1
    return [Fraction(weight, sum(weights)) for weight in weights]


class Target:
    """A random conditional distribution for every path."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab

    def __call__(self, path: Path) -> list[Fraction]:
        return random_distribution(random.Random(f"{self.seed} {path}"), self.vocab, zeros=True)


def random_tree(seed: int, vocab: int, levels: int) -> DraftTree:
    rng = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    frontier = [0]
    for _ in range(levels):
        below: list[int] = []
        for row in frontier:
            for token in rng.sample(range(vocab), rng.randint(0, 2)):
                tokens.append(token)
                parents.append(row)
                below.append(len(tokens))
        frontier = below
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [3, 4, 6])
def test_matched_sampling_over_a_tree_commits_the_targets_distribution(
    seed: int, vocab: int
) -> None:
    target, tree = Target(seed, vocab), random_tree(seed, vocab, levels=3)
    length = 4  # deeper than the tree: the rest is decoded plainly

    def speculative(choices: Choices) -> Path:
        answer: list[int] = []

        def sample(row: int) -> int:
            return choices.choose(list(enumerate(target(tuple(answer)))))

        def finished(token: int) -> bool:
            answer.append(token)
            return len(answer) == length

        walk(tree, sample, finished)
        while len(answer) < length:
            walk(DraftTree(), sample, finished)
        return tuple(answer)

    got: dict[Path, Fraction] = defaultdict(Fraction)
    for answer, probability in enumerate_runs(speculative):
        got[answer] += probability
    wanted: dict[Path, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        wanted = {
            (*path, token): p * q
            for path, p in wanted.items()
            for token, q in enumerate(target(path))
            if q
        }
    assert got == wanted


def test_a_walk_accepts_with_the_mass_of_the_children() -> None:
    target = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    tree = DraftTree((0, 2), (0, 0), (0.0, 0.0))
    accepted = Fraction(0)
    for result, probability in enumerate_runs(
        lambda c: (
            walk(tree, lambda _: c.choose(list(enumerate(target))), lambda _: True).accepted,
        )
    ):
        accepted += probability * result[0]
    assert accepted == Fraction(1, 2) + Fraction(1, 6)


def draw_siblings(choices: Choices, draft: Sequence[Fraction], count: int) -> list[int]:
    """Draws without replacement, by the definition."""
    siblings: list[int] = []
    for _ in range(count):
        left = {t: p for t, p in enumerate(draft) if p and t not in siblings}
        if not left:
            break
        total = sum(left.values())
        siblings.append(choices.choose([(t, p / total) for t, p in left.items()]))
    return siblings


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_rejection_sampling_over_siblings_gives_the_targets_distribution(
    seed: int, count: int
) -> None:
    rng = random.Random(seed)
    vocab = rng.randint(3, 5)
    target = random_distribution(rng, vocab, zeros=True)
    draft = random_distribution(rng, vocab, zeros=seed % 2 == 0)

    def run(choices: Choices) -> Path:
        siblings = draw_siblings(choices, draft, count)
        token = rejection_sample(
            target,
            draft,
            siblings,
            lambda p: bool(choices.choose([(1, p), (0, 1 - p)])),
            lambda d: choices.choose(list(enumerate(d))),
        )
        return (token,)

    got = [Fraction(0)] * vocab
    for (token,), probability in enumerate_runs(run):
        got[token] += probability
    assert got == target


@pytest.mark.parametrize("seed", range(6))
def test_rejection_sampling_down_a_tree_gives_the_targets_distribution(seed: int) -> None:
    vocab, levels = 3, 3
    target, drafter = Target(seed, vocab), Target(seed + 100, vocab)

    def run(choices: Choices) -> Path:
        path: Path = ()
        for _ in range(levels):
            draft = drafter(path)
            siblings = draw_siblings(choices, draft, 2)
            token = rejection_sample(
                target(path),
                draft,
                siblings,
                lambda p: bool(choices.choose([(1, p), (0, 1 - p)])),
                lambda d: choices.choose(list(enumerate(d))),
            )
            path = (*path, token)
        return path

    got: dict[Path, Fraction] = defaultdict(Fraction)
    for path, probability in enumerate_runs(run):
        got[path] += probability
    for path, probability in got.items():
        wanted = Fraction(1)
        for index, token in enumerate(path):
            wanted *= target(path[:index])[token]
        assert probability == wanted
    assert sum(got.values()) == 1


def test_the_walk_ends_with_the_answer_even_inside_of_an_accepted_run() -> None:
    tree = DraftTree((5, 6, 7), (0, 1, 2), (-1.0, -2.0, -3.0))
    drawn = iter([5, 6, 7, 8])
    result = walk(tree, lambda _: next(drawn), lambda token: token == 6)
    assert (result.tokens, result.rows, result.accepted) == ((5, 6), (0, 1), 2)
