"""`coppice train fit`: a dataset in, a head out; a checkpoint and a learning curve on the way."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from torch import Tensor

from coppice.errors import StartError
from coppice.models.heads.stored import StoredHead
from coppice.models.heads.token_map import read_token_map
from coppice.models.hub import resolve_model
from coppice.models.loading import load_embeddings, read_config, target_hash
from coppice.settings import Settings
from kernels import ops
from training.batches import Lesson
from training.card import OPTIONS_FILE, note_data, write_card
from training.dataset import Dataset, frequent_tokens, token_counts
from training.kinds import CPU, Kind, Target, kind_named
from training.learners import Learner, Lecture
from training.objective import Objective
from training.run import CHECKPOINT_FILE, Rhythm, Run
from training.trainer import Schedule, Trainer

DRAFT_SLOTS = 65536


class FitOptions(BaseModel):
    """All that decides the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str  # one of training.kinds.KINDS
    data: tuple[Path, ...]
    init: Path | None  # a head to go on from; None: from the beginning
    epochs: int
    batch_tokens: int
    learning_rate: float
    steps: int  # of training-time test (1: none), or Medusa heads
    layers: int  # of a draft model
    feature_weight: float
    noise: float
    vocabulary: int  # tokens of the draft vocabulary; those of `init` come first
    held_out: int  # samples to judge with
    seed: int


def fit(
    settings: Settings, options: FitOptions, output: Path, console: Console, rhythm: Rhythm
) -> None:
    """Trains to the end, from the checkpoint in `output` if there is one, and leaves the head
    there. Raises StartError."""
    ops.set_threads(settings.verifier.threads)
    # Unlike a service, a fit works with torch's own products.
    torch.set_num_threads(settings.verifier.threads or len(os.sched_getaffinity(0)))
    kind = kind_named(options.kind, options.steps, options.layers)
    path = resolve_model(settings.model.path, settings.cache_dir)
    datasets = [open_dataset(folder, path) for folder in options.data]
    kept = torch.empty(0, dtype=torch.int64)
    if options.init is not None and kind.reduced_vocabulary:
        kept = draft_vocabulary(options.init, read_config(path).vocab_size)
    embedding, target = read_target(path, datasets, options.vocabulary, kept)
    learning, held_out = split(datasets, kind, target, options.held_out, options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    drafted = target.token_map if kind.reduced_vocabulary else None
    objective = Objective(target.lm_head, drafted, options.feature_weight, generator)
    learner = kind.learner(target, Lecture(embedding, objective, options.steps, generator))
    if options.init is not None:
        _take_up(learner, kind, options.init)
    schedule = Schedule(
        options.epochs, options.batch_tokens, options.learning_rate, options.noise, options.seed
    )
    trainer = Trainer(learner, learning, schedule, generator)
    _begin(output, options, trainer)
    note_data(output, datasets)
    judged = judging(settings, kind, output)
    samples = [lesson.sample for lesson in held_out]
    Run(trainer, kind, target, output, judged, samples, rhythm).to_the_end(console)
    write_card(output)


def split(
    datasets: Sequence[Dataset], kind: Kind, target: Target, held_out: int, seed: int
) -> tuple[list[Lesson], list[Lesson]]:
    """Lessons to learn and lessons to judge with, chosen by the seed."""
    lessons = [
        kind.lesson(sample, dataset.description.feature_layers, target)
        for dataset in datasets
        for sample in dataset.samples()
        if sample.answer_rows > 0
    ]
    if len(lessons) <= held_out:
        raise StartError(f"{len(lessons)} samples, {held_out} of them held out: too few to learn")
    chosen = set(np.random.default_rng(seed).permutation(len(lessons))[:held_out].tolist())
    learning = [lesson for index, lesson in enumerate(lessons) if index not in chosen]
    return learning, [lessons[index] for index in sorted(chosen)]


def judging(settings: Settings, kind: Kind, output: Path) -> Settings:
    """Settings that draft with the head in `output`. On a CPU fp32 is the fastest; the bits of a
    draft have no say in what is right."""
    speculation = {**kind.speculation(output), "ngram": False}
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"dtype": "float32"}),
            "speculation": settings.speculation.model_copy(update=speculation),
            "drafter": settings.drafter.model_copy(update={"kv_slots": DRAFT_SLOTS}),
        }
    )


def open_dataset(folder: Path, target: Path) -> Dataset:
    """Raises StartError unless it holds answers of the model in the directory `target`."""
    dataset = Dataset.open(folder)
    if dataset.description.target_hash != target_hash(target):
        raise StartError(
            f"{folder} holds answers of {dataset.description.target}, not of {target}: "
            "set model.path to the model that answered"
        )
    return dataset


def draft_vocabulary(head: Path, vocab_size: int) -> Tensor:
    """[draft_vocab] int64: the tokens that a head for `vocab_size` tokens can draft."""
    token_map = read_token_map(StoredHead.open(head), vocab_size, CPU)
    return torch.arange(vocab_size) if token_map is None else token_map


def read_target(
    path: Path, datasets: Sequence[Dataset], vocabulary: int, kept: Tensor
) -> tuple[Tensor, Target]:
    """The target's embedding [vocab, hidden], and the rest of what is needed of it. The draft
    vocabulary has the tokens `kept` [any] and then the commonest ones."""
    config = read_config(path)
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for dataset in datasets:
        counts += token_counts(dataset)
    counts[kept] += counts.sum() + 1
    embedding, lm_head = load_embeddings(path, config, torch.float32, CPU)
    norm = Target.weight(path, "model.norm.weight", config.hidden_size)
    token_map = torch.tensor(frequent_tokens(counts, vocabulary))
    return embedding, Target(path, config, lm_head, norm, token_map)


def _take_up(learner: Learner, kind: Kind, path: Path) -> None:
    try:
        learner.load_published(kind.stored(path))
    except (OSError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise StartError(
            f"head {path} is not of the kind and size that is trained here: {reason}"
        ) from None


def _begin(output: Path, options: FitOptions, trainer: Trainer) -> None:
    """Takes up the run in `output`, or begins one there."""
    output.mkdir(parents=True, exist_ok=True)
    if not (output / CHECKPOINT_FILE).exists():
        (output / OPTIONS_FILE).write_text(options.model_dump_json(indent=1) + "\n")
        return
    if FitOptions.model_validate_json((output / OPTIONS_FILE).read_text()) != options:
        raise StartError(
            f"{output} holds a run with other options ({OPTIONS_FILE}): take another --output"
        )
    trainer.restore(output / CHECKPOINT_FILE)
