"""`coppice train prepare`: prompts in, the target's answers with its features out."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from coppice.errors import StartError
from coppice.models.heads.published import usual_feature_layers
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target, target_hash
from coppice.models.placement import choose_device
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from kernels import ops
from training.dataset import Dataset, Description
from training.generation import Generator, questions
from training.prompts import HeldOut, Prompt, read_prompts

SHARD_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    prompts: Sequence[Path]
    held_out: Sequence[Path]  # prompts that nothing may overlap
    output: Path
    count: int  # prompts at most
    temperatures: tuple[float, ...]
    max_prompt_tokens: int
    max_answer_tokens: int
    sessions: int  # answers at once
    layers: bool  # keep the features of EAGLE-3, beside the final one
    seed: int


def prepare(settings: Settings, options: PrepareOptions, console: Console) -> Dataset:
    """Writes what is missing of the dataset; it can be stopped and started again at any time.

    Raises StartError when nothing is left of the prompts, or another dataset is there.
    """
    ops.set_threads(settings.verifier.threads)
    path = resolve_model(settings.model.path, settings.cache_dir)
    prompts = choose_prompts(Tokenizer.load(path), options)
    device = choose_device(settings.model.device)
    # Data need not have the bits that the service has: on a CPU, fp32 products are the fastest.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = load_target(path, dtype, device)
    layers = (*usual_feature_layers(model.config), model.config.layers) if options.layers else ()
    description = Description(
        target=settings.model.path,
        target_hash=target_hash(path),
        vocab_size=model.config.vocab_size,
        feature_size=model.config.hidden_size * max(1, len(layers)),
        feature_layers=layers,
        prompts=tuple(file.name for file in options.prompts),
        held_out=tuple(file.name for file in options.held_out),
        temperatures=options.temperatures,
        max_prompt_tokens=options.max_prompt_tokens,
        max_answer_tokens=options.max_answer_tokens,
        seed=options.seed,
        shards=-(-len(prompts) // SHARD_PROMPTS),
        shard_prompts=SHARD_PROMPTS,
    )
    dataset = Dataset.begin(options.output, description)
    length = options.max_prompt_tokens + options.max_answer_tokens
    generator = Generator(model, min(options.sessions, len(prompts)), length, layers)
    _write_missing(dataset, generator, prompts, options, console)
    return dataset


def choose_prompts(tokenizer: Tokenizer, options: PrepareOptions) -> list[list[int]]:
    """Token ids of the prompts that fit, in an order that the seed decides. Each text counts once,
    and none that overlaps what is held out."""
    held_out = HeldOut(prompt for file in options.held_out for prompt in read_prompts(file))
    seen: set[Prompt] = set()
    for file in options.prompts:
        seen |= {prompt for prompt in read_prompts(file) if prompt not in held_out}
    ordered = sorted(seen, key=lambda prompt: [message.content for message in prompt])
    random.Random(options.seed).shuffle(ordered)
    chosen: list[list[int]] = []
    for prompt in ordered:
        # A character is a third of a token at least: what is far too long need not be encoded.
        if sum(len(message.content) for message in prompt) > 12 * options.max_prompt_tokens:
            continue
        tokens = tokenizer.encode_chat(prompt)
        if len(tokens) <= options.max_prompt_tokens:
            chosen.append(tokens)
        if len(chosen) == options.count:
            break
    if not chosen:
        raise StartError(
            f"no prompt of {len(ordered)} has at most {options.max_prompt_tokens} tokens: "
            "raise --max-prompt-tokens"
        )
    return chosen


def _write_missing(
    dataset: Dataset,
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    options: PrepareOptions,
    console: Console,
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    missing = dataset.missing()
    with Progress(*columns, console=console) as progress:
        done = len(prompts) - sum(
            len(prompts[n * SHARD_PROMPTS : (n + 1) * SHARD_PROMPTS]) for n in missing
        )
        task = progress.add_task("answers", total=len(prompts), completed=done, rate=0.0)
        started, tokens = time.monotonic(), 0

        def count(new: int) -> None:
            nonlocal tokens
            tokens += new
            progress.update(task, rate=tokens / (time.monotonic() - started))

        for number in missing:
            first = number * SHARD_PROMPTS
            part = prompts[first : first + SHARD_PROMPTS]
            asked = questions(
                part, options.temperatures, options.seed, first, options.max_answer_tokens
            )
            dataset.write(number, generator.answer(asked, count))
            progress.advance(task, len(part))
