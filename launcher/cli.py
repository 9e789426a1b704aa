"""The command line. What a command needs is imported in it, so that help and errors are fast."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coppice.errors import CoppiceError
from coppice.settings import Settings
from launcher.bench import bench_app
from launcher.settings_flags import takes_settings
from launcher.sources import load_settings
from launcher.train import train_app

START_FAILED = 2
INTERRUPTED = 130
# What the messages can carry; the service alone says what is allowed.
MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1

app = typer.Typer(
    help="EAGLE-2 speculative decoding as a gRPC service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(train_app, name="train")
app.add_typer(bench_app, name="bench")


@app.command()
@takes_settings
def up(settings: Settings) -> None:
    """Start everything: Redis, Ray, verifier, drafter and gateway. Ctrl-C stops it."""
    from launcher.logs import configure_logs
    from launcher.signals import run_stoppable
    from launcher.up import up as serve

    configure_logs(settings.log_level)
    console = Console(stderr=True)
    raise typer.Exit(run_stoppable(lambda: serve(settings, console)))


@app.command()
@takes_settings
def demo(settings: Settings) -> None:
    """Start everything, ask one question with and without speculation, stop everything."""
    from launcher.demo import demo as show
    from launcher.signals import run_stoppable

    console = Console(stderr=True)
    raise typer.Exit(run_stoppable(lambda: show(settings, console)))


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="one question; without it, a conversation or all of stdin")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="of the service", show_default="as `up` would"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="draft and verify trees")
    ] = True,
    stats: Annotated[bool, typer.Option("--stats", help="what the answer cost")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=MAX_INT32, help="0 = off")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 = off")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 = off")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 = off")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="0 = off")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="0 = off")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_UINT64, help="drawn by the service when absent")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=MAX_INT32, help="of the answer")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="ends the answer; repeatable")] = None,
) -> None:
    """Ask the running service, and stream its answer."""
    from launcher.chat import talk
    from launcher.client import AnswerOptions, Client
    from protos.common_pb2 import SamplingParams, StoppingParams

    options = AnswerOptions(
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
        ),
        StoppingParams(max_tokens=max_tokens, stop=stop or ()),
        speculation,
    )
    with Client(address or default_address()) as client:
        talk(client, options, prompt, system, stats)


def default_address() -> str:
    gateway = load_settings({}).gateway
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(gateway.host, gateway.host)
    return f"{host}:{gateway.port}"


@app.command()
def scale(
    verifiers: Annotated[int, typer.Option(min=1, max=64, help="workers that run the target")],
    drafters: Annotated[int, typer.Option(min=0, max=64, help="workers that draft")],
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, max=3600.0, metavar="SECONDS", help="for answers of verifiers that leave"
        ),
    ] = 30.0,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="of the service", show_default="as `up` would"),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="of the service, where it is on another machine")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of settings")
    ] = None,
) -> None:
    """Give the running service more or fewer workers. No answer breaks off."""
    flags = {"gateway.port": port, "redis.url": redis_url}
    given = {name: value for name, value in flags.items() if value is not None}
    settings = load_settings(given, config)
    from asyncio import run

    from launcher.scaling import Wanted
    from launcher.scaling import scale as ask

    run(ask(settings, Wanted(verifiers, drafters, grace)))
    print(f"{verifiers} verifiers, {drafters} drafters")


@app.command()
def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face id, checkpoint directory or GGUF file", show_default="the small one"
        ),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="for converted models")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of settings")
    ] = None,
) -> None:
    """Fetch and convert a model, so that `up` starts at once."""
    flags = {"model.path": model, "cache_dir": cache_dir}
    given = {name: value for name, value in flags.items() if value is not None}
    settings = load_settings(given, config)
    from launcher.pull import pull as fetch

    fetch(settings, Console(stderr=True))


@app.command()
@takes_settings
def doctor(
    settings: Settings,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what this machine has, what is missing and how to mend it."""
    from launcher.doctor import examine
    from launcher.findings import as_json, show

    findings = examine(settings)
    if json:
        print(as_json(findings))
    else:
        show(findings, Console())
    raise typer.Exit(int(any(finding.is_missing for finding in findings)))


def main() -> None:
    """Runs a command. What the user can mend is one line on stderr and an exit code."""
    try:
        app()
    except CoppiceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(START_FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
