"""`coppice train`: the commands of the room `training`."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coppice.settings import Settings
from launcher.settings_flags import takes_settings

train_app = typer.Typer(help="Make a draft head for a model, and judge it.", no_args_is_help=True)

Data = Annotated[list[Path], typer.Option("--data", help="dataset of `prepare`; repeatable")]
Output = Annotated[Path, typer.Option("--output", help="directory; an unfinished run goes on")]
Seed = Annotated[int, typer.Option(min=0, help="same seed, same result")]
Sessions = Annotated[int, typer.Option(min=1, help="answers that are decoded at once")]
Openings = Annotated[
    Path | None, typer.Option(help="file of first words, one a line", show_default="built in")
]
PromptSets = Annotated[
    list[Path] | None,
    typer.Option(
        help="a set of prompts: .jsonl, .json or .txt; repeatable",
        show_default="MT-bench, GSM8K and HumanEval",
    ),
]
CountOfEach = Annotated[int, typer.Option(min=1, help="prompts of each set, the first ones")]


@train_app.command()
@takes_settings
def invent(
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", help="JSON lines")],
    count: Annotated[int, typer.Option(min=1, help="prompts at most")] = 1000,
    openings: Openings = None,
    sessions: Sessions = 128,
    seed: Seed = 0,
) -> None:
    """Let the model invent prompts, for `prepare`."""
    from training.invention import invent, read_openings

    invent(settings, read_openings(openings), count, sessions, seed, output, console())


@train_app.command()
@takes_settings
def prepare(
    settings: Settings,
    prompts: Annotated[
        list[Path], typer.Option("--prompts", help=".jsonl, .json or .txt; repeatable")
    ],
    output: Output,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(help="prompts to judge with: nothing like them is taken; repeatable"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="prompts at most")] = 4096,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="of the answers, in turn", show_default="0, 0, 0.7, 1"),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1)] = 160,
    max_answer_tokens: Annotated[int, typer.Option(min=3)] = 160,
    sessions: Sessions = 256,
    layers: Annotated[
        bool, typer.Option("--layers", help="keep what EAGLE-3 heads read, too")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Let the model answer prompts, and keep its answers and features to learn from."""
    from training.prepare import PrepareOptions
    from training.prepare import prepare as write

    options = PrepareOptions(
        prompts,
        held_out or (),
        output,
        count,
        tuple(temperature or (0.0, 0.0, 0.7, 1.0)),
        max_prompt_tokens,
        max_answer_tokens,
        sessions,
        layers,
        seed,
    )
    write(settings, options, console())


@train_app.command()
@takes_settings
def fit(
    settings: Settings,
    data: Data,
    output: Output,
    kind: Annotated[str, typer.Option(help="eagle, eagle3, medusa or model")] = "eagle",
    init: Annotated[
        Path | None, typer.Option(help="head to go on from", show_default="from scratch")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    batch_tokens: Annotated[int, typer.Option(min=1, help="answer tokens of a step")] = 1280,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="at its highest")] = 5e-4,
    steps: Annotated[int, typer.Option(min=1, max=8, help="of unrolling, or Medusa heads")] = 3,
    layers: Annotated[int, typer.Option(min=1, help="of a draft model")] = 2,
    feature_weight: Annotated[float, typer.Option(min=0.0, help="of the feature loss")] = 1.0,
    noise: Annotated[float, typer.Option(min=0.0, help="on the features")] = 0.1,
    vocabulary: Annotated[int, typer.Option(min=1, help="tokens that can be drafted")] = 8192,
    held_out: Annotated[int, typer.Option(min=1, help="samples to judge with")] = 32,
    seed: Seed = 0,
) -> None:
    """Train a head. Killed, it goes on from its last checkpoint when it is started again."""
    from training.fit import FitOptions
    from training.fit import fit as train
    from training.run import Rhythm

    options = FitOptions(
        kind=kind,
        data=tuple(data),
        init=init,
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        steps=steps,
        layers=layers,
        feature_weight=feature_weight,
        noise=noise,
        vocabulary=vocabulary,
        held_out=held_out,
        seed=seed,
    )
    train(settings, options, output, console(), Rhythm())


@train_app.command()
@takes_settings
def evaluate(
    settings: Settings,
    prompts: PromptSets = None,
    count: CountOfEach = 40,
    tokens: Annotated[int, typer.Option(min=3, help="of an answer at most")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="repeatable", show_default="0, 1")
    ] = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=63, help="of a tree, the root on top; repeatable", show_default="7, 15, 63"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="where the results go")] = None,
    picture: Annotated[Path | None, typer.Option(help="where a PNG goes")] = None,
    card: Annotated[
        Path | None, typer.Option(help="directory of `fit` whose README.md gets the results")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Measure how much of the model's answers a head (--head) guesses right."""
    from training.card import check_run, note_evaluation
    from training.evaluate import EvaluateOptions
    from training.evaluate import evaluate as judge
    from training.evaluation_prompts import default_files
    from training.picture import new_figure
    from training.report import as_json, draw, show

    # What is missing is said before the long work.
    if picture is not None:
        new_figure(1, 1)
    if card is not None:
        check_run(card)
    options = EvaluateOptions(
        prompts or default_files(),
        count,
        tokens,
        tuple(temperature or (0.0, 1.0)),
        tuple(nodes or (7, 15, 63)),
        seed,
    )
    evaluation = judge(settings, options, console())
    results = as_json(evaluation)
    show(evaluation, Console())
    if json is not None:
        json.write_text(dumps(results, indent=2) + "\n", encoding="utf-8")
    if card is not None:
        note_evaluation(card, results)
    if picture is not None:
        draw(evaluation, picture)


@train_app.command()
@takes_settings
def adapt(
    settings: Settings,
    output: Output,
    text: Annotated[
        list[Path] | None, typer.Option(help="text of the domain, such as logs; repeatable")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="prompts of the domain: .jsonl, .json or .txt; repeatable"),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="general dataset of `prepare`, against forgetting; repeatable"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="pieces of the domain at most")] = 4096,
    window: Annotated[int, typer.Option(min=16, max=512, help="tokens of a piece")] = 128,
    general_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="general samples among those learnt from")
    ] = 0.3,
    held_out: Annotated[int, typer.Option(min=1, help="samples to judge with, of each kind")] = 32,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="answer tokens of a step")] = 1280,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="at its highest")] = 2e-4,
    seed: Seed = 0,
) -> None:
    """Let an EAGLE head (--head) learn a domain, and print its acceptance before and after."""
    from coppice.models.heads.loading import shipped_head
    from training.adapt import AdaptOptions, show
    from training.adapt import adapt as learn

    options = AdaptOptions(
        head=settings.speculation.head or shipped_head(),
        text=tuple(text or ()),
        prompts=tuple(prompts or ()),
        data=tuple(data or ()),
        count=count,
        window=window,
        general_share=general_share,
        held_out=held_out,
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        seed=seed,
    )
    show(learn(settings, options, output, console()), Console())


def console() -> Console:
    return Console(stderr=True)
