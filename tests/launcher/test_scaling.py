"""A service is asked through Redis for more or fewer workers, and says what came of it."""

import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.client import Pipeline

from coppice.errors import StartError, Unavailable
from coppice.redis_calls import close_client, redis_client, run_calls
from coppice.settings import GatewaySettings, RedisSettings, Settings
from launcher import scaling
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


async def test_no_lost_reply_of_redis_loses_a_request_or_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: Counter[tuple[str, ...]] = Counter()

    async def lossy(calls: Pipeline) -> list[Any]:
        """Done, but the first reply to each kind of call gets lost; not the first "is somebody
        there", as a Redis that never answered is none."""
        kind = tuple(command[0][0] for command in calls.command_stack)
        replies = await run_calls(calls)
        met[kind] += 1
        if met[kind] == (2 if kind[0] == "EXISTS" else 1):
            raise Unavailable("no reply within a second")
        return replies

    fleet = ScriptedFleet()
    monkeypatch.setattr(scaling, "run_calls", lossy)
    monkeypatch.setattr(scaling, "POLL_SECONDS", 0.01)
    async with redis() as url, asyncio.timeout(20):
        given = settings(tmp_path, url)
        async with scalable(given, url, fleet):
            await scale(given, WANTED)
    assert set(fleet.asked) == {(2, 3, 0.5)}
    assert len(met) == 5


async def test_a_request_that_is_none_is_answered_and_not_the_last(tmp_path: Path) -> None:
    fleet = ScriptedFleet()
    async with redis() as url, asyncio.timeout(20):
        given = settings(tmp_path, url)
        client = redis_client(url)
        for nonsense in ("no JSON", "[]", '{"id": "1", "verifiers": 1}'):
            await client.rpush(f"coppice:scale:{given.ray.namespace}", nonsense)
        await close_client(client)
        async with scalable(given, url, fleet):
            await scale(given, WANTED)
    assert fleet.asked == [(2, 3, 0.5)]


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
