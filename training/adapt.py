"""`coppice train adapt`: an existing EAGLE head learns a user's domain.

A head that guesses everyday answers well can be at a loss on jargon and log lines. It goes on
learning from the domain's text and prompts, mixed with general data so that it forgets nothing,
and is judged on what the target says about parts of the domain that it has not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coppice.errors import StartError
from coppice.models.heads.loading import feature_layers
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target, read_config, target_hash
from coppice.models.placement import choose_device
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from drafter_svc.building import build_drafter
from kernels import ops
from training.acceptance import acceptance
from training.card import ADAPT_FILE
from training.dataset import Dataset, Description, Sample
from training.domain import TEMPERATURES, Piece, Teacher, read_domain
from training.fit import FitOptions, draft_vocabulary, fit, judging, open_dataset, read_target
from training.kinds import Kind, Target, kind_named
from training.run import Rhythm

SHARD_PIECES = 256
ADDED_TOKENS = 2048  # of the domain, at most, that the head's draft vocabulary lacks
STEPS = 3  # of unrolling
GOAL = 0.8  # of the head's general acceptance length


class AdaptOptions(BaseModel):
    """All that decides the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: Path
    text: tuple[Path, ...]  # of the domain
    prompts: tuple[Path, ...]  # of the domain
    data: tuple[Path, ...]  # general, datasets of `prepare`
    count: int  # pieces of the domain to learn from, at most
    window: int  # tokens of a piece, at most
    general_share: float  # of the samples that are learnt from
    held_out: int  # pieces of the domain, and general samples, to judge with
    epochs: int
    batch_tokens: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Acceptance lengths of one head."""

    domain: float
    general: float | None  # without general data


@dataclass(frozen=True, slots=True)
class Adaptation:
    before: Lengths
    after: Lengths

    def share(self, of: Lengths) -> float | None:
        """The domain's length over the general one of the head as it was given."""
        return of.domain / self.before.general if self.before.general else None


def adapt(settings: Settings, options: AdaptOptions, output: Path, console: Console) -> Adaptation:
    """Leaves the head in `output`; stopped, it goes on when it is started again. Raises
    StartError."""
    _begin(output, options)
    ops.set_threads(settings.verifier.threads)
    path = resolve_model(settings.model.path, settings.cache_dir)
    known = draft_vocabulary(options.head, read_config(path).vocab_size)
    _, target = read_target(path, (), len(known), known)
    layers = feature_layers(options.head, target.config)
    name = "eagle3" if layers else "eagle"
    kind = kind_named(name, STEPS, 1)
    held_out, learnt = _pieces(Tokenizer.load(path), options)
    device = choose_device(settings.model.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kept = (*layers, target.config.layers) if layers else ()
    teacher = Teacher(load_target(path, dtype, device), options.window, kept)
    description = _description(settings, options, target, kept, len(learnt))
    domain = _write(output / "domain", description, learnt, teacher, options.seed, console)
    wanted = round(len(learnt) * options.general_share / (1.0 - options.general_share))
    general = _general(options, kind, target, kept, options.held_out + wanted)
    data = [domain, *_write_general(output / "general", description, general[options.held_out :])]
    exams = [
        [kind.lesson(sample, kept, target).sample for sample in samples]
        for samples in (teacher.exams(held_out), general[: options.held_out])
    ]
    del teacher  # with the target in it
    before = _judge(settings, kind, options.head, *exams)
    # An EAGLE-3 head's own LM head has no rows for more tokens.
    vocabulary = len(known) + (0 if layers else ADDED_TOKENS)
    fit(settings, _fit_options(options, name, vocabulary, data), output, console, Rhythm())
    return Adaptation(before, _judge(settings, kind, output, *exams))


def _begin(output: Path, options: AdaptOptions) -> None:
    output.mkdir(parents=True, exist_ok=True)
    file = output / ADAPT_FILE
    if file.exists() and AdaptOptions.model_validate_json(file.read_bytes()) != options:
        raise StartError(
            f"{output} holds a run with other options ({ADAPT_FILE}): take another --output"
        )
    file.write_text(options.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _pieces(tokenizer: Tokenizer, options: AdaptOptions) -> tuple[list[Piece], list[Piece]]:
    """Of the domain, to judge with and to learn from."""
    most = options.held_out + options.count
    pieces = read_domain(
        tokenizer, options.text, options.prompts, options.window, most, options.seed
    )
    if len(pieces) <= 2 * options.held_out:
        raise StartError(
            f"{len(pieces)} pieces of the domain, {options.held_out} of them to judge with: too "
            "few to learn from; give more text, or a smaller --window or --held-out"
        )
    return pieces[: options.held_out], pieces[options.held_out :]


def _description(
    settings: Settings,
    options: AdaptOptions,
    target: Target,
    layers: tuple[int, ...],
    pieces: int,
) -> Description:
    return Description(
        target=settings.model.path,
        target_hash=target_hash(target.path),
        vocab_size=target.config.vocab_size,
        feature_size=target.config.hidden_size * max(1, len(layers)),
        feature_layers=layers,
        prompts=tuple(file.name for file in (*options.text, *options.prompts)),
        held_out=(),
        temperatures=TEMPERATURES,
        max_prompt_tokens=options.window,
        max_answer_tokens=options.window,
        seed=options.seed,
        shards=-(-pieces // SHARD_PIECES),
        shard_prompts=SHARD_PIECES,
    )


def _write(
    path: Path,
    description: Description,
    pieces: Sequence[Piece],
    teacher: Teacher,
    seed: int,
    console: Console,
) -> Dataset:
    """What is missing of it."""
    dataset = Dataset.begin(path, description)
    for number in track(dataset.missing(), "reading the domain", console=console):
        first = number * SHARD_PIECES
        lessons = teacher.lessons(pieces[first : first + SHARD_PIECES], first, seed)
        dataset.write(number, lessons)
    return dataset


def _general(
    options: AdaptOptions, kind: Kind, target: Target, layers: tuple[int, ...], count: int
) -> list[Sample]:
    """`count` samples of the general data, or as many as there are, chosen by the seed, with the
    features of `layers`. None where there is no general data."""
    datasets = [open_dataset(folder, target.path) for folder in options.data]
    shards = [(dataset, n) for dataset in datasets for n in range(dataset.description.shards)]
    chosen: list[Sample] = []
    for index in np.random.default_rng(options.seed).permutation(len(shards)).tolist():
        dataset, number = shards[index]
        if len(chosen) >= count:
            break
        found = dataset.description.feature_layers
        if layers not in ((), found):
            raise StartError(f"{dataset.path} has features of layers {found}, needed: {layers}")
        for sample in dataset.read(number) if number not in dataset.missing() else ():
            if sample.answer_rows > 0:
                chosen.append(sample if layers else kind.lesson(sample, found, target).sample)
    return chosen[:count]


def _write_general(
    path: Path, description: Description, samples: Sequence[Sample]
) -> list[Dataset]:
    if not samples:
        return []
    one = {"prompts": ("general data",), "shards": 1, "shard_prompts": len(samples)}
    dataset = Dataset.begin(path, description.model_copy(update=one))
    if dataset.missing():
        dataset.write(0, samples)
    return [dataset]


def _fit_options(
    options: AdaptOptions, kind: str, vocabulary: int, data: Sequence[Dataset]
) -> FitOptions:
    return FitOptions(
        kind=kind,
        data=tuple(dataset.path for dataset in data),
        init=options.head,
        epochs=options.epochs,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        steps=STEPS,
        layers=1,
        feature_weight=1.0,
        noise=0.1,
        vocabulary=vocabulary,
        held_out=options.held_out,
        seed=options.seed,
    )


def _judge(
    settings: Settings,
    kind: Kind,
    head: Path,
    domain: Sequence[Sample],
    general: Sequence[Sample],
) -> Lengths:
    drafter = build_drafter(judging(settings, kind, head))
    nodes = Rhythm().nodes
    return Lengths(
        acceptance(drafter, domain, nodes).length,
        acceptance(drafter, general, nodes).length if general else None,
    )


def show(adaptation: Adaptation, console: Console) -> None:
    nodes = Rhythm().nodes
    title = f"Acceptance length on held-out samples, {nodes + 1} rows"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("head", "domain", "general", "domain / general before"):
        table.add_column(heading, justify="left" if heading == "head" else "right")
    for name, lengths in (("before", adaptation.before), ("after", adaptation.after)):
        share = adaptation.share(lengths)
        table.add_row(
            name,
            f"{lengths.domain:.2f}",
            "-" if lengths.general is None else f"{lengths.general:.2f}",
            "-" if share is None else f"{share:.0%}",
        )
    console.print(table)
    share = adaptation.share(adaptation.after)
    if share is not None:
        reached = "reached" if share >= GOAL else "not reached"
        console.print(f"{GOAL:.0%} of the general acceptance length: {reached}.", highlight=False)
