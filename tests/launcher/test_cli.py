import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from coppice.settings import Settings
from launcher.cli import app
from launcher.settings_flags import takes_settings
from launcher.sources import leaves

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def settings_of(*arguments: str) -> tuple[Settings, bool]:
    """What a command gets from these flags."""
    received: list[tuple[Settings, bool]] = []
    probe = typer.Typer()

    @probe.command()
    @takes_settings
    def command(settings: Settings, own: Annotated[bool, typer.Option("--own")] = False) -> None:  # pyright: ignore[reportUnusedFunction]
        received.append((settings, own))

    result = CliRunner().invoke(probe, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return received[0]


def test_every_setting_has_a_description() -> None:
    assert [leaf.name for leaf in leaves() if not leaf.field.description] == []


@pytest.mark.parametrize("command", ["up", "demo", "doctor"])
def test_every_setting_is_a_flag(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env=WIDE).output
    assert [leaf.flag for leaf in leaves() if f"{leaf.flag} " not in text] == []


def test_every_flag_fills_its_setting() -> None:
    samples = {
        "model.path": "p",
        "model.served_name": "s",
        "model.dtype": "float16",
        "model.quantization": "int8",
        "model.device": "cuda:1",
        "speculation.drafter": "medusa",
        "speculation.ngram": "False",
        "speculation.tree": "static",
        "speculation.budget": "fixed",
        "speculation.head": "/head",
        "gateway.host": "::1",
        "redis.url": "redis://r",
        "ray.address": "a:1",
        "ray.namespace": "n",
        "verifier.kv_slots": "128",
        "verifier.memory_fraction": "0.5",
        "verifier.placement": "spread",
        "verifier.prefix_cache": "False",
        "drafter.kv_slots": "64",
        "drafter.quantization": "none",
        "cache_dir": "/cache",
        "log_level": "debug",
    }
    values = {leaf.name: samples.get(leaf.name, "5") for leaf in leaves()}
    arguments = [part for leaf in leaves() for part in (leaf.flag, values[leaf.name])]
    settings, _ = settings_of(*arguments)
    for leaf in leaves():
        value = settings
        for part in leaf.path:
            value = getattr(value, part)
        assert str(value).removesuffix(".0") == values[leaf.name], leaf.name


def test_the_model_has_a_short_flag_and_a_command_keeps_its_own() -> None:
    settings, own = settings_of("--model", "/m", "--own")
    assert settings.model.path == "/m"
    assert own


def test_an_unknown_flag_is_refused() -> None:
    result = CliRunner().invoke(app, ["up", "--guard-entr", "3"], env=WIDE)
    assert result.exit_code == 2
    assert "--guard-entr" in result.output


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("coppice")), *arguments]
    return subprocess.run(
        command, env={"PATH": "", **environment}, capture_output=True, text=True, check=False
    )


def test_help_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from launcher.cli import app;"
        "assert CliRunner().invoke(app, ['up', '--help']).exit_code == 0;"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("command", ["up", "demo", "doctor", "chat", "pull"])
def test_a_wrong_variable_is_one_line_and_exit_code_2(command: str) -> None:
    result = run(command, COPPICE_GUARD__ENTR="1")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: environment variable COPPICE_GUARD__ENTR")
