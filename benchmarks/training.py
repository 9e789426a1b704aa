"""How much of the machine's arithmetic a fit uses: `python -m benchmarks.training --json FILE`.

Steps of `coppice train fit` with its default settings, on made-up samples of the target's shapes:
what is computed does not depend on the numbers. The products of a step, forward and backward, are
counted by torch and set against a large square product of the same type in the same run.
"""

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import peak_gflop_s, timed
from coppice.machine import machine
from coppice.models.heads.published import usual_feature_layers
from coppice.models.hub import resolve_model
from coppice.models.loading import load_embeddings, read_config
from launcher.sources import load_settings
from training.dataset import Sample
from training.kinds import CPU, KINDS, Target, kind_named
from training.learners import Lecture
from training.objective import Objective
from training.trainer import Schedule, Trainer

PROMPT, ANSWER = 64, 160  # tokens of a sample
BATCH_TOKENS, STEPS, VOCABULARY, LAYERS = 1280, 3, 8192, 2  # as `fit` has them
WARM_UP, MEASURED = 3, 9  # steps


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    kinds: Annotated[str, typer.Option(help="of drafters")] = ",".join(KINDS),
) -> None:
    """Measures, prints and writes one JSON object."""
    settings = load_settings({})
    path = resolve_model(settings.model.path, settings.cache_dir)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    peak = peak_gflop_s(torch.float32)
    results = {
        "machine": machine(),
        "peak_gflop_s": round(peak, 1),
        "kinds": {name: measure(path, name, peak) for name in kinds.split(",")},
    }
    text = json.dumps(results, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)


def measure(path: Path, name: str, peak: float) -> dict[str, float]:
    """Of one kind of drafter for the target in `path`; `peak` in GFLOP/s."""
    trainer = made_up(path, name)
    steps = trainer.run()
    for _ in range(WARM_UP):
        next(steps)
    seconds = statistics.median(timed(lambda: next(steps)) for _ in range(MEASURED))
    with FlopCounterMode(display=False) as counted:
        taught = next(steps).tokens
    speed = counted.get_total_flops() / seconds / 1e9
    return {
        "tokens_s": round(taught / seconds, 1),
        "gflop_per_step": round(counted.get_total_flops() / 1e9, 2),
        "gflop_s": round(speed, 1),
        "fraction_of_peak": round(speed / peak, 3),
    }


def made_up(path: Path, name: str) -> Trainer:
    """A fit of a head from scratch on random samples, all of one length."""
    config = read_config(path)
    embedding, lm_head = load_embeddings(path, config, torch.float32, CPU)
    norm = Target.weight(path, "model.norm.weight", config.hidden_size)
    size = min(VOCABULARY, config.vocab_size)
    target = Target(path, config, lm_head, norm, torch.arange(size))
    kind = kind_named(name, STEPS, LAYERS)
    generator = torch.Generator().manual_seed(0)
    objective = Objective(
        lm_head, target.token_map if kind.reduced_vocabulary else None, 1.0, generator
    )
    learner = kind.learner(target, Lecture(embedding, objective, STEPS, generator))
    layers = (*usual_feature_layers(config), config.layers)
    count = (WARM_UP + MEASURED + 1) * (BATCH_TOKENS // (ANSWER - 1))
    lessons = [
        kind.lesson(sample, layers, target)
        for sample in samples(count, size, config.hidden_size * len(layers))
    ]
    return Trainer(learner, lessons, Schedule(1, BATCH_TOKENS, 1e-4, 0.1, 0), generator)


def samples(count: int, vocabulary: int, features: int) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(vocabulary, (PROMPT + ANSWER,), generator=generator)
        rows = torch.randn((PROMPT + ANSWER - 1, features), generator=generator)
        yield Sample(tokens.int(), PROMPT, 0.0, rows.to(torch.bfloat16))


if __name__ == "__main__":
    typer.run(main)
