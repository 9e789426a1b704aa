"""`coppice bench`: benchmarks that are commands."""

import importlib
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coppice.settings import Settings
from launcher.settings_flags import takes_settings
from launcher.train import CountOfEach, PromptSets

bench_app = typer.Typer(help="Measure this machine with a model.", no_args_is_help=True)


@bench_app.command()
@takes_settings
def paradigms(
    settings: Settings,
    medusa: Annotated[Path | None, typer.Option(help="directory of Medusa heads")] = None,
    eagle3: Annotated[Path | None, typer.Option(help="directory of an EAGLE-3 head")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="small model of the same tokenizer")
    ] = None,
    prompts: PromptSets = None,
    count: CountOfEach = 4,
    tokens: Annotated[int, typer.Option(min=2, help="of an answer")] = 128,
    json: Annotated[Path | None, typer.Option(help="where the results go")] = None,
) -> None:
    """Compare the ways to draft: acceptance length, speed, memory."""
    from training.evaluation_prompts import default_files

    # The benchmarks are a floor above this one: called by name, so that nothing here imports them.
    benchmark = importlib.import_module("benchmarks.paradigms")
    options = benchmark.ParadigmOptions(
        medusa, eagle3, draft_model, prompts or default_files(), count, tokens
    )
    comparison = benchmark.compare(settings, options, Console(stderr=True))
    benchmark.show(comparison, Console())
    if json is not None:
        json.write_text(dumps(benchmark.as_json(comparison), indent=2) + "\n", encoding="utf-8")


@bench_app.command()
@takes_settings
def load(
    settings: Settings,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="clients that ask again and again")
    ] = "1,2,4,8,16,32,64,128",
    modes: Annotated[
        str, typer.Option(help="auto = as set; off = plain; on = fixed budget, no guard")
    ] = "auto,off,on",
    rounds: Annotated[int, typer.Option(min=1, help="in which the modes take turns")] = 2,
    answers: Annotated[
        int, typer.Option(min=1, help="of a mode in a round; one of each client at least")
    ] = 24,
    tokens: Annotated[int, typer.Option(min=2, help="of an answer")] = 64,
    prompts: PromptSets = None,
    vllm: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM, to compare with")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="where the results go")] = None,
    picture: Annotated[Path | None, typer.Option(help="where a PNG goes")] = None,
) -> None:
    """Drive the whole service with many clients: speed and latency by concurrency and mode."""
    from training.evaluation_prompts import default_files
    from training.picture import new_figure

    benchmark = importlib.import_module("benchmarks.load")
    report = importlib.import_module("benchmarks.load_report")
    if picture is not None:  # what is missing is said before the long work
        new_figure(1, 1)
    options = benchmark.LoadOptions.parsed(
        concurrency, modes, rounds, answers, tokens, prompts or default_files(), vllm
    )
    measured = benchmark.measure(settings, options, Console(stderr=True))
    report.show(measured, Console())
    if json is not None:
        json.write_text(dumps(report.as_json(measured), indent=2) + "\n", encoding="utf-8")
    if picture is not None:
        report.draw(measured, picture)
