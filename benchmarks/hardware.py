"""What passes and drafts take, and how much of a tree is accepted: the curves of `simulate.py`.

Numbers are measured or published where a comment says so, and assumed otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_LEVELS = 6  # of a tree at most
_FRONTIER = 8  # nodes of a level at most


@dataclass(frozen=True, slots=True)
class Hardware:
    """A target on its hardware, with a drafter."""

    name: str
    step_ms: tuple[tuple[int, float], ...]  # of a pass by its rows; straight lines through these
    # A level of a draft takes this share of a pass of the target with as many rows.
    level_share: float
    accepted: tuple[float, ...]  # probability by rank that a tree's best, second best ... node is
    shared: bool = False  # drafter and verifier compete for the same cores

    def step_seconds(self, rows: int) -> float:
        return _line(self.step_ms, rows) / 1000

    def level_seconds(self, nodes: int, sessions: int) -> list[float]:
        """Of the levels of trees for so many sessions in one batch, which grow as deep as they
        can."""
        widths = [1] + [min(nodes, _FRONTIER)] * (min(nodes, _LEVELS) - 1)
        return [self.level_share * self.step_seconds(sessions * width) for width in widths]

    def walk(self, nodes: int, random: Random) -> list[int]:
        """Rows of a tree's `nodes` that are accepted, each by itself."""
        chances = enumerate(self.accepted[:nodes], start=1)
        return [row for row, chance in chances if random.random() < chance]


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    """On the straight lines through `points`, and beyond the last one on the last line."""
    place = next((i for i, point in enumerate(points) if x <= point[0]), len(points) - 1)
    (left, low), (right, high) = points[max(0, place - 1)], points[max(1, place)]
    return low + (high - low) * (x - left) / (right - left)


# SmolLM2-135M-Instruct in bf16 on two cores: docs/performance.md, "Kernels": ms by rows of a step,
# and a level of a draft takes 0.09 of a one-row step. Acceptance by rank: a power fitted to what of
# the shipped head's trees of 31 nodes was accepted in 793 greedy steps (6 questions of each set, 96
# tokens): 0.36, 0.15, 0.10, 0.07, 0.06, 0.05, 0.04 ..., in all 1.02 of the first 15, 1.16 of 31.
CPU = Hardware(
    "cpu",
    (
        (1, 10.2), (2, 10.4), (4, 11.6), (8, 14.7), (12, 17.8), (16, 21.0), (24, 29.9), (32, 38.9),
        (64, 74.6),
    ),
    0.09,
    tuple(0.36 * rank**-1.16 for rank in range(1, 64)),
    shared=True,
)  # fmt: skip

# Llama-3.1-8B in bf16 on one H100, for which SGLang's documentation ("Speculative Decoding",
# MT-bench, one request) gives 158.34 tokens/s plain, so 6.32 ms for a row, 244.10 with EAGLE-2 and
# 373.25 with EAGLE-3. Assumed: 10 us more for each row while memory is the limit, and above that
# 60 % of the data sheet's 989 TFLOP/s for 2 x 8.03e9 operations a row.
_H100_STEP_MS = ((1, 6.32), (370, 10.0), (740, 20.0))
# A level then takes 0.25 of a pass, with which six of them, a pass of 60 rows and the acceptance
# lengths below give the published tokens/s of both heads. That is dear, as it contains all that the
# engine does besides.
_H100_LEVEL_SHARE = 0.25

# Acceptance lengths with 60 rows: 4.0 for EAGLE-2, 6.0 for EAGLE-3 (arXiv 2503.01840). Assumed: the
# first node's probability, and that it falls by rank as a power, which is fitted to the lengths.
H100_EAGLE2 = Hardware(
    "h100-eagle2",
    _H100_STEP_MS,
    _H100_LEVEL_SHARE,
    tuple(0.72 * rank**-1.05 for rank in range(1, 64)),
)
H100_EAGLE3 = Hardware(
    "h100-eagle3",
    _H100_STEP_MS,
    _H100_LEVEL_SHARE,
    tuple(0.85 * rank**-0.877 for rank in range(1, 64)),
)

HARDWARE = {each.name: each for each in (CPU, H100_EAGLE2, H100_EAGLE3)}
