"""What verifications and drafts of this machine cost, and what trees of all shapes would gain."""

import time
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from coppice.models.decoder import Decoder
from coppice.tree import DraftTree
from drafter_svc.drafter import Drafter
from training.acceptance import draft_request
from training.dataset import Sample
from training.shapes import DEPTH, MOST_NODES, NODES, Lengths, accepted
from verifier_svc.runner import Rows, Runner

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 200  # tokens before the root
ROUNDS = 7  # over all numbers of rows in turn: the machine's moods hit all alike
TIMED_DRAFTS = 16


def step_seconds(model: Decoder, rows: Iterable[int] = ROWS) -> dict[int, float]:
    """Median seconds of the greedy verification of one tree, by its rows."""
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    runner = Runner(model, CONTEXT + max(seconds))
    for timed in range(ROUNDS + 1):
        for count, each in seconds.items():
            siblings = count - 1
            tree = DraftTree((1,) * siblings, (0,) * siblings, (0.0,) * siblings)
            batch = Rows(
                tokens=[1] * count,
                positions=[CONTEXT + depth for depth in tree.depths()],
                slots=range(CONTEXT, CONTEXT + count),
                context=range(CONTEXT),
                masks=tree.masks(),
                logits=count,
            )
            started = time.perf_counter()
            runner.run([batch])[0].argmax(-1).tolist()
            if timed:  # the first round warms up
                each.append(time.perf_counter() - started)
    return {count: median(each) for count, each in seconds.items()}


def draft_seconds(drafter: Drafter, sample: Sample) -> list[float]:
    """Median seconds of drafts of 1, 2, ... DEPTH levels below one root after another of a sample.
    The drafter's trees have DEPTH levels where its policy finds any that deep."""
    catching_up: list[float] = []
    levels: list[list[float]] = [[] for _ in range(DEPTH)]
    first = sample.prompt_length + 1
    # Two tokens at a time, as many as a verification commits or so; the first draft reads the
    # prompt, and is left out.
    for committed in range(first, len(sample.tokens), 2)[: TIMED_DRAFTS + 1]:
        drafter.propose([draft_request(drafter, "timed", sample, committed, MOST_NODES)])
        if committed > first or len(sample.tokens) < first + 3:
            catching_up.append(drafter.times.catch_up_seconds)
            for level, seconds in zip(levels, drafter.times.seconds_per_depth, strict=False):
                level.append(seconds)
    drafter.forget("timed")
    known = [median(level) for level in levels if level]
    # The last level is cheaper: nothing is forwarded after it.
    *inner, last = known
    inner += [inner[-1] if inner else last] * (DEPTH - len(known))
    return [median(catching_up) + sum(inner[:level]) + last for level in range(DEPTH)]


def lengths_everywhere(drafter: Drafter, samples: Sequence[Sample]) -> list[Lengths]:
    """For each sample [positions, DEPTH, len(NODES)]: what trees of all depths and sizes would get
    accepted below each of its tokens. The drafter's policy is `WholeTrees`."""
    lengths = [
        np.zeros((sample.answer_rows, DEPTH, len(NODES)), dtype=np.int64) for sample in samples
    ]
    for position in range(max(sample.answer_rows for sample in samples)):
        going = [index for index, each in enumerate(lengths) if position < len(each)]
        requests = [
            draft_request(
                drafter,
                str(index),
                samples[index],
                samples[index].prompt_length + 1 + position,
                MOST_NODES,
            )
            for index in going
        ]
        for index, tree in zip(going, drafter.propose(requests), strict=True):
            sample = samples[index]
            follows = sample.tokens[sample.prompt_length + 1 + position :].tolist()
            lengths[index][position] = accepted(tree, follows)
    for index in range(len(samples)):
        drafter.forget(str(index))
    return lengths
