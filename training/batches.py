"""From samples to the batches of a step: an order that a seed decides, and no more padding than
needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.dataset import Sample
from training.module import Batch

POOL_BATCHES = 16  # so many batches' samples are sorted by length among themselves


@dataclass(frozen=True, slots=True)
class Order:
    """Which samples make up each step of an epoch."""

    lengths: Sequence[int]  # of the answers
    batch_tokens: int  # answer tokens of a batch, padding included, at most
    seed: int

    def epoch(self, number: int) -> list[list[int]]:
        """Indices of samples, batch after batch. All samples once."""
        random = np.random.default_rng((self.seed, number))
        shuffled: list[int] = random.permutation(len(self.lengths)).tolist()
        longest = max(self.lengths)
        pool = POOL_BATCHES * max(1, self.batch_tokens // longest)
        batches: list[list[int]] = []
        for start in range(0, len(shuffled), pool):
            part = sorted(shuffled[start : start + pool], key=self.lengths.__getitem__)
            batches.extend(self._cut(part))
        return [batches[index] for index in random.permutation(len(batches))]

    def _cut(self, indices: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for index in indices:  # ascending, so the new one is the longest
            if batches[-1] and (len(batches[-1]) + 1) * self.lengths[index] > self.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sample whose features are what a head reads, with what it is to predict."""

    sample: Sample
    final: Tensor  # [length - 1, hidden] bf16, the target's final features

    @classmethod
    def final_only(cls, sample: Sample) -> "Lesson":
        return cls(sample, sample.features)


def collate(lessons: Sequence[Lesson], noise: float, generator: torch.Generator) -> Batch:
    """Pads at the end. Inputs carry uniform noise in [-noise, noise) (EAGLE, section 4.2); targets
    do not."""
    samples = [lesson.sample for lesson in lessons]
    positions = max(len(sample.tokens) - 2 for sample in samples)
    rows = max(sample.answer_rows for sample in samples)
    shape, answer = (len(samples), positions), (len(samples), rows)
    tokens = torch.zeros(shape, dtype=torch.int64)
    features = torch.zeros((*shape, samples[0].features.shape[1]))
    targets = torch.zeros((*answer, lessons[0].final.shape[1]))
    labels = torch.zeros(answer, dtype=torch.int64)
    valid = torch.zeros(answer, dtype=torch.bool)
    for index, lesson in enumerate(lessons):
        sample, count = lesson.sample, lesson.sample.answer_rows
        length = len(sample.tokens) - 2
        tokens[index, :length] = sample.tokens[1:-1]
        features[index, :length] = sample.features[:-1]
        targets[index, :count] = lesson.final[-count:]
        labels[index, :count] = sample.tokens[-count:]
        valid[index, :count] = True
    if noise:
        features += noise * (2.0 * torch.rand(features.shape, generator=generator) - 1.0)
    start = torch.tensor([int(sample.tokens[0]) for sample in samples])
    first = torch.tensor([sample.prompt_length - 1 for sample in samples])
    return Batch(start, tokens, features, first, targets, labels, valid)
