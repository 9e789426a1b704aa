"""The two acceptance rules: what of a draft tree is committed.

Both are written over callbacks instead of tensors, so that tests can enumerate every outcome with
rational arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from coppice.tree import DraftTree

N = TypeVar("N", float, Fraction)


@dataclass(frozen=True, slots=True)
class Walk:
    """What one verification commits."""

    rows: tuple[int, ...]  # rows of the tree whose tokens are now computed, root first
    tokens: tuple[int, ...]  # committed tokens; the last one is the new root unless finished
    accepted: int  # drafted tokens among them


def walk(tree: DraftTree, sample: Callable[[int], int], finished: Callable[[int], bool]) -> Walk:
    """Matched sampling: commits what plain decoding would have produced.

    `sample(row)` draws the target's own token at a row, at that row's position and with the path
    so far in view; `finished(token)` takes note of a token and says whether the answer ends with
    it. Exact because plain decoding makes the very same calls, one per step.
    """
    children = tree.children()
    rows, tokens = [0], list[int]()
    while True:
        token = sample(rows[-1])
        tokens.append(token)
        child = children[rows[-1]].get(token)
        if finished(token) or child is None:
            return Walk(tuple(rows), tuple(tokens), len(tokens) - (child is None))
        rows.append(child)


def residual(target: Sequence[N], draft: Sequence[N]) -> list[N]:
    """Normalized max(0, target - draft): what is drawn from after a rejection (Leviathan et al.
    2023, section 2.3). `target` itself where nothing is left of it."""
    left = [max(m - d, m - m) for m, d in zip(target, draft, strict=True)]
    total = sum(left[1:], left[0])
    return [value / total for value in left] if total > 0 else list(target)


def without(draft: Sequence[N], token: int) -> list[N]:
    """`draft` renormalized without `token`: what the next sibling was drawn from."""
    left = [p - p if index == token else p for index, p in enumerate(draft)]
    total = sum(left[1:], left[0])
    return [value / total for value in left] if total > 0 else left


def rejection_sample(
    target: Sequence[N],
    draft: Sequence[N],
    siblings: Sequence[int],
    accept: Callable[[N], bool],
    draw: Callable[[Sequence[N]], int],
) -> int:
    """Speculative rejection sampling over sibling drafts; returns a token distributed as `target`.

    `siblings` must have been drawn from `draft` in this order without replacement. `accept(p)` is
    true with probability p; `draw(d)` draws from the distribution d. Sources: Leviathan et al.
    2023 (one draft), Chen et al. 2023, SpecInfer (Miao et al. 2024, several drafts).
    """
    target, draft = list(target), list(draft)
    for token in siblings:
        if target[token] >= draft[token] or accept(target[token] / draft[token]):
            return token
        target, draft = residual(target, draft), without(draft, token)
    return draw(target)
