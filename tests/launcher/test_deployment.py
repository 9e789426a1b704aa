"""The commands for big machines in docs/deployment.md are ones that this version takes."""

import re
import shlex
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.sharding import fitting_sizes
from coppice.settings import Settings
from launcher.placement import needs_of_rank
from launcher.settings_flags import takes_settings

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
# Of Llama-3.3-70B.
TARGET = DecoderConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 1e-5, RopeConfig(), 131072)


def commands() -> list[list[str]]:
    """The arguments of every `coppice up` of the page."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line) for line in lines if line.startswith("coppice ")]
    assert all(each[:2] == ["coppice", "up"] for each in words)
    return [each[2:] for each in words]


def settings_of(arguments: list[str]) -> Settings:
    received: list[Settings] = []
    probe = typer.Typer()

    @probe.command()
    @takes_settings
    def command(settings: Settings, own: Annotated[bool, typer.Option("--own")] = False) -> None:  # pyright: ignore[reportUnusedFunction]
        received.append(settings)

    result = CliRunner().invoke(probe, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return received[0]


def test_there_is_a_command_for_one_host_and_two_for_two() -> None:
    one, two, over_both = (settings_of(arguments) for arguments in commands())
    assert (one.verifier.count, one.ray.address, one.redis.url) == (1, None, None)
    assert (two.verifier.count, two.drafter.count) == (2, 2)
    assert (over_both.verifier.count, over_both.drafter.count) == (1, 1)
    for settings in (two, over_both):
        assert settings.ray.address == "10.0.0.1:6379"
        assert settings.redis.url == "redis://10.0.0.1:6380"


@pytest.mark.parametrize(
    ("arguments", "ranks", "hosts"),
    list(zip(commands(), (8, 8, 16), ([8], [8, 8], [8, 8]), strict=True)),
    ids=["one-host", "two-hosts", "over-both"],
)
def test_every_flag_fills_its_setting_and_the_target_can_be_split_so(
    arguments: list[str], ranks: int, hosts: list[int]
) -> None:
    settings = settings_of(arguments)
    assert settings.verifier.tensor_parallel == ranks
    assert needs_of_rank(settings.model.device, settings.verifier, hosts)["GPU"] == 1.0
    assert settings.verifier.tensor_parallel in fitting_sizes(TARGET)
    assert settings.model.device == "cuda"
    assert (settings.model.max_context or 0) < settings.verifier.kv_slots
    assert settings.speculation.head == Path("/models/EAGLE3-LLaMA3.3-Instruct-70B")


def test_the_sizes_in_the_text_are_the_targets() -> None:
    kv = 2 * TARGET.layers * TARGET.kv_heads * TARGET.head_dim * 2
    assert f"{kv // 1024} KiB, {kv // 8 // 1024} KiB of it on each rank" in PAGE
    exchanges, row, host = 2 * TARGET.layers, TARGET.hidden_size * 4, 8  # ranks of a host
    assert f"the {exchanges} halves of layers" in PAGE and f"{row // 1024} KiB a row" in PAGE
    between = exchanges * row * host
    assert f"{between // 2**20} MiB from either host" in PAGE
    assert f"{32 * between / 1e9:.1f} GB for a tree of 31 nodes" in PAGE
    assert f"take {3 * TARGET.hidden_size * 2 // 1024} KiB, on the first rank alone" in PAGE
