import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis.asyncio

from coppice.errors import StartError
from launcher.redis_server import check_redis, embedded_redis

HOLDS_A_SERVER = """
import asyncio, sys
from pathlib import Path
from launcher.redis_server import embedded_redis

async def main():
    async with embedded_redis(Path(sys.argv[1])):
        print("up", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_embedded_server_is_a_real_one(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path) as url:
        client = redis.asyncio.from_url(url)
        await client.set("key", "value")
        assert await client.get("key") == b"value"
        await client.aclose()


async def test_the_embedded_server_listens_on_no_port(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    async with embedded_redis(tmp_path):
        (server,) = set(psutil.Process().children()) - before
        assert server.net_connections("inet") == []


async def test_the_embedded_server_ends_with_its_context(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    async with embedded_redis(tmp_path):
        children = set(psutil.Process().children()) - before
        assert children
    assert not any(child.is_running() for child in children)


def test_the_embedded_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS_A_SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        (server,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
        server.wait(timeout=5)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock", "ftp://127.0.0.1"]
)
async def test_no_server_is_one_line_with_a_mend(url: str) -> None:
    with pytest.raises(StartError) as caught:
        await check_redis(url)
    message = str(caught.value)
    assert url in message
    assert "; " in message
    assert "\n" not in message
