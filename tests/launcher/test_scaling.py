"""A service is asked through Redis for more or fewer workers, and says what came of it."""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coppice.errors import StartError
from coppice.settings import GatewaySettings, RedisSettings, Settings
from launcher.cluster import Worker
from launcher.fleet import _beyond
from launcher.redis_server import embedded_redis
from launcher.scaling import Wanted, findable, scalable, scale

WANTED = Wanted(verifiers=2, drafters=3, grace_seconds=0.5)
PORT = 1234


@dataclass
class ScriptedFleet:
    """Notes what it is asked for."""

    failure: str = ""
    asked: list[tuple[int, int, float]] = field(default_factory=list)

    async def resize(self, verifiers: int, drafters: int, grace_seconds: float) -> None:
        self.asked.append((verifiers, drafters, grace_seconds))
        if self.failure:
            raise StartError(self.failure)


@asynccontextmanager
async def redis() -> AsyncIterator[str]:
    # Short, as a socket lies in it.
    with tempfile.TemporaryDirectory() as folder:
        async with embedded_redis(Path(folder)) as url:
            yield url


def settings(cache_dir: Path, url: str | None = None) -> Settings:
    return Settings(
        cache_dir=cache_dir, gateway=GatewaySettings(port=PORT), redis=RedisSettings(url=url)
    )


@pytest.mark.parametrize("named", [True, False])
async def test_a_running_service_is_found_and_asked(tmp_path: Path, named: bool) -> None:
    fleet = ScriptedFleet()
    async with redis() as url:
        given = settings(tmp_path, url if named else None)
        async with scalable(given, url, fleet):
            with findable(given, PORT, url):
                await scale(given, WANTED)
                await scale(given, Wanted(1, 0, 0.0))
    assert fleet.asked == [(2, 3, 0.5), (1, 0, 0.0)]
    assert list((tmp_path / "running").iterdir()) == []


async def test_what_went_wrong_there_is_said_here(tmp_path: Path) -> None:
    async with redis() as url:
        given = settings(tmp_path, url)
        async with scalable(given, url, ScriptedFleet("verifier-1: no memory")):
            with pytest.raises(StartError, match=r"^verifier-1: no memory$"):
                await scale(given, WANTED)


async def test_no_service_at_this_port_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^no service at port 1234 .*`coppice up`[^\n]*$"):
        await scale(settings(tmp_path), WANTED)


async def test_a_service_that_was_killed_is_one_line(tmp_path: Path) -> None:
    given = settings(tmp_path)
    url = f"unix://{tmp_path}/redis.sock"
    with findable(given, PORT, url), pytest.raises(StartError, match=f"no service .* at {url}"):
        await scale(given, WANTED)


async def test_a_redis_without_a_service_is_one_line(tmp_path: Path) -> None:
    async with redis() as url:
        with pytest.raises(StartError, match="no service listens there"):
            await scale(settings(tmp_path, url), WANTED)


def test_the_command_says_in_one_line_that_nothing_runs(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("coppice")), "scale"]
    result = subprocess.run(
        [*command, "--verifiers", "2", "--drafters", "1", "--port", str(PORT)],
        env={"PATH": "", "COPPICE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: no service at port {PORT} ")
    assert result.stderr.count("\n") == 1


def test_the_workers_with_the_highest_numbers_leave_first() -> None:
    workers = {name: Worker(name, None) for name in ("v-10", "v-2", "v-9")}
    assert [worker.name for worker in _beyond(workers, 1)] == ["v-9", "v-10"]
