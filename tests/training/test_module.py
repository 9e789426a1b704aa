"""What is trained is what is served: unrolled heads against the drafters' own forward pass, one
chain after the other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coppice.models.heads.head import DraftHead
from coppice.models.heads.loading import load_head
from coppice.models.loading import load_embeddings, load_target, read_config
from coppice.models.medusa import load_medusa
from kernels.batch import AttentionBatch, Segment
from training.batches import Lesson, collate
from training.dataset import Sample
from training.draft_model import chosen_layers
from training.kinds import DraftModelKind, Kind, Target, kind_named
from training.learners import Learner, Lecture
from training.objective import Objective

CPU = torch.device("cpu")
HIDDEN, STEPS = 32, 3


def lecture(target: Target, embedding: Tensor, steps: int = STEPS) -> Lecture:
    generator = torch.Generator().manual_seed(1)
    objective = Objective(target.lm_head, target.token_map, 1.0, generator)
    return Lecture(embedding, objective, steps, generator)


def known(path: Path) -> tuple[Tensor, Target]:
    config = read_config(path)
    embedding, lm_head = load_embeddings(path, config, torch.float32, CPU)
    norm = Target.weight(path, "model.norm.weight", HIDDEN)
    token_map = torch.tensor([1, 2, 5, 8, 13, 21, 34, 35, 36, 50])
    return embedding, Target(path, config, lm_head, norm, token_map)


def lessons(vectors: int) -> list[Lesson]:
    """Of different lengths, so that there is padding."""
    random = torch.Generator().manual_seed(2)
    made: list[Lesson] = []
    for prompt, length in ((3, 12), (6, 9), (1, 7)):
        tokens = torch.randint(60, (length,), generator=random, dtype=torch.int32)
        features = torch.randn((length - 1, vectors * HIDDEN), generator=random).bfloat16()
        final = torch.randn((length - 1, HIDDEN), generator=random).bfloat16()
        made.append(Lesson(Sample(tokens, prompt, 0.0, features), final))
    return made


def trained(kind: Kind, target: Target, embedding: Tensor, path: Path, steps: int) -> Learner:
    """A learner whose weights are as stored, so that bf16 makes no difference."""
    learner = kind.learner(target, lecture(target, embedding, steps))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    kind.write(path, learner.published(), target)
    learner.load_published(kind.stored(path))
    return learner


def chain(head: DraftHead, sample: Sample, start: int, steps: int) -> list[Tensor]:
    """Features that a chain from position `start` predicts: a pass over all true pairs up to it,
    then one pass for each further pair with the feature predicted last."""
    cache = head.new_cache(64)
    features = head.reduce(sample.features[: start + 1].float())
    tokens = sample.tokens.long()

    def run(tokens: Tensor, features: Tensor, first: int) -> Tensor:
        slots = torch.arange(first, first + len(tokens))
        segment = Segment(len(tokens), torch.arange(first), slots, None)
        return head.forward(tokens, features, cache, AttentionBatch(slots, slots, (segment,)))[-1]

    outputs = [run(tokens[1 : start + 2], features, 0)]
    for position in range(start + 1, start + steps):
        outputs.append(run(tokens[position + 1][None], outputs[-1][None], position))
    return outputs


@pytest.mark.parametrize(("name", "vectors"), [("eagle", 1), ("eagle3", 3)])
def test_unrolled_steps_are_those_of_the_served_head(
    target: Path, tmp_path: Path, name: str, vectors: int
) -> None:
    embedding, known_target = known(target)
    kind = kind_named(name, STEPS, 1)
    learner = trained(kind, known_target, embedding, tmp_path / "head", STEPS)
    head = load_head(
        tmp_path / "head", known_target.config, embedding, known_target.lm_head, torch.float32, CPU
    )
    taught = lessons(vectors)
    with torch.no_grad():
        outputs = learner.module.unroll(  # pyright: ignore
            collate(taught, 0.0, torch.Generator()), STEPS
        )
    compared = 0
    for index, lesson in enumerate(taught):
        sample = lesson.sample
        last = sample.prompt_length - 1 + sample.answer_rows
        for start in range(sample.prompt_length - 1, last):
            row = start - (sample.prompt_length - 1)
            expected = chain(head, sample, start, min(STEPS, last - start))
            for step, feature in enumerate(expected):
                found = outputs[step][index, row + step]
                torch.testing.assert_close(found, feature, atol=2e-4, rtol=2e-4)
                compared += 1
    assert compared == sum(3 * n - 3 for n in (8, 2, 5))


def test_medusa_heads_are_served_as_they_were_trained(target: Path, tmp_path: Path) -> None:
    embedding, known_target = known(target)
    kind = kind_named("medusa", 2, 1)
    learner = trained(kind, known_target, embedding, tmp_path / "head", 2)
    heads = load_medusa(
        tmp_path / "head", known_target.config, known_target.lm_head, torch.float32, CPU
    )
    features = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(4))
    for head, block in zip(heads.heads, learner.module, strict=True):  # pyright: ignore
        expected = block[0](features) @ known_target.lm_head.T
        torch.testing.assert_close(head.logits(features), expected, atol=1e-4, rtol=1e-4)


def test_a_draft_model_begins_as_layers_of_the_target_and_is_served_as_trained(
    target: Path, tmp_path: Path
) -> None:
    embedding, known_target = known(target)
    kind = DraftModelKind(3)
    begun = kind.learner(known_target, lecture(known_target, embedding)).published()
    for new, old in enumerate((0, 2, 5)):  # of 6 layers; 2.5 is rounded to even
        name = "self_attn.q_proj.weight"
        theirs = Target.weight(target, f"model.layers.{old}.{name}", 32, 32)
        assert torch.equal(begun[f"model.layers.{new}.{name}"], theirs)
    assert chosen_layers(2, 30) == [0, 29]

    learner = trained(kind, known_target, embedding, tmp_path / "draft", 1)
    model = load_target(tmp_path / "draft", torch.float32, CPU)
    sample = lessons(1)[0].sample
    slots = torch.arange(len(sample.tokens))
    batch = AttentionBatch(slots, slots, (Segment(len(slots), torch.arange(0), slots, None),))
    expected = model.forward(sample.tokens.long(), model.new_cache(64), batch)
    embedded = model.weights.embedding[sample.tokens.long()][None]
    with torch.no_grad():
        found = learner.module.norm(learner.module(embedded))[0]  # pyright: ignore
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_what_each_row_is_taught_is_what_followed_it(target: Path) -> None:
    taught = lessons(1)
    batch = collate(taught, 0.0, torch.Generator())
    for index, lesson in enumerate(taught):
        sample = lesson.sample
        for row in range(sample.answer_rows):
            t = sample.prompt_length - 1 + row
            assert int(batch.positions[index, row]) == t
            assert int(batch.tokens[index, t]) == int(sample.tokens[t + 1])
            assert int(batch.labels[index, row]) == int(sample.tokens[t + 2])
            assert torch.equal(batch.features[index, t], sample.features[t].float())
            assert torch.equal(batch.targets[index, row], lesson.final[t + 1].float())
        assert batch.valid[index].tolist() == [
            row < sample.answer_rows for row in range(batch.valid.shape[1])
        ]


def test_noise_is_within_its_bounds_and_spares_the_targets(target: Path) -> None:
    taught = lessons(1)
    plain = collate(taught, 0.0, torch.Generator())
    noisy = collate(taught, 0.5, torch.Generator().manual_seed(0))
    difference = (noisy.features - plain.features).abs()
    assert 0.4 < float(difference.max()) <= 0.5
    assert torch.equal(noisy.targets, plain.targets)
