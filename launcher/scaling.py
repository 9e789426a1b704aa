"""`coppice scale`: a running service is asked, through its Redis, for more or fewer workers."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Generator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from coppice.background import forever
from coppice.errors import CoppiceError, StartError, Unavailable, first_line
from coppice.redis_calls import close_client, redis_client, run_calls
from coppice.settings import Settings
from launcher.fleet import Fleet

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
ALIVE_SECONDS = 5.0
ANSWER_SECONDS = 60.0  # an outcome is kept


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers there should be."""

    verifiers: int
    drafters: int
    grace_seconds: float  # for running sessions of those that leave


class ScalingCalls:
    """Requests and their outcomes in Redis. Every method raises Unavailable when that is away."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._requests = f"coppice:scale:{namespace}"
        self._alive = f"{self._requests}:alive"

    async def announce(self) -> None:
        """Somebody listens, for a while."""
        async with self._client.pipeline(transaction=False) as calls:
            calls.set(self._alive, 1, px=int(ALIVE_SECONDS * 1000))
            await run_calls(calls)

    async def next_request(self) -> bytes | None:
        """The oldest one without an answer. It stays the next until it has one, so that neither
        is lost with a reply of Redis; what is asked for may be done twice."""
        async with self._client.pipeline(transaction=False) as calls:
            calls.lindex(self._requests, 0)
            return (await run_calls(calls))[0]

    async def answer(self, request: bytes, outcome: str) -> None:
        """`outcome` is empty, or says what went wrong."""
        async with self._client.pipeline(transaction=True) as calls:
            calls.set(self._answer_key(request), outcome, ex=int(ANSWER_SECONDS))
            calls.execute_command("LREM", self._requests, 0, request)
            await run_calls(calls)

    async def ask(self, wanted: Wanted) -> str:
        """Returns the outcome. Raises StartError when nobody listens (any more)."""
        request = json.dumps({"id": uuid.uuid4().hex, **asdict(wanted)}).encode()
        asked, heard_at = False, -math.inf
        while True:
            try:
                if (outcome := await self._outcome(request)) is not None:
                    return outcome
                heard_at = time.monotonic()
                if not asked:
                    await self._push(request)
                    asked = True
            except Unavailable:
                if time.monotonic() - heard_at > ALIVE_SECONDS:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def _outcome(self, request: bytes) -> str | None:
        """None while there is none. Raises StartError when there won't be one."""
        async with self._client.pipeline(transaction=False) as calls:
            calls.exists(self._alive)
            calls.get(self._answer_key(request))
            listens, outcome = await run_calls(calls)
        if outcome is not None:
            return outcome.decode()
        if not listens:
            raise StartError("no service listens there; start one with `coppice up`")
        return None

    async def _push(self, request: bytes) -> None:
        async with self._client.pipeline(transaction=False) as calls:
            calls.rpush(self._requests, request)
            await run_calls(calls)

    def _answer_key(self, request: bytes) -> str:
        return f"{self._requests}:{hashlib.sha256(request).hexdigest()}"


@contextlib.asynccontextmanager
async def scalable(settings: Settings, redis_url: str, fleet: Fleet) -> AsyncGenerator[None, None]:
    """The fleet follows requests while the context lasts."""
    client = redis_client(redis_url)
    calls = ScalingCalls(client, settings.ray.namespace)
    await _announce(calls)
    loops = (partial(_announce, calls), partial(_follow, calls, fleet))
    tasks = [asyncio.create_task(forever(loop, POLL_SECONDS)) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_client(client)


async def _announce(calls: ScalingCalls) -> None:
    with contextlib.suppress(Unavailable):  # without Redis nobody can ask for anything
        await calls.announce()


async def _follow(calls: ScalingCalls, fleet: Fleet) -> None:
    with contextlib.suppress(Unavailable):
        if (request := await calls.next_request()) is not None:
            await calls.answer(request, await _resized(fleet, request))


async def _resized(fleet: Fleet, request: bytes) -> str:
    try:
        fields = json.loads(request)
        del fields["id"]
        wanted = Wanted(**fields)
        await fleet.resize(wanted.verifiers, wanted.drafters, wanted.grace_seconds)
    except CoppiceError as error:
        return str(error)
    except Exception as error:  # of Ray, or a request of another version's
        logger.exception("scaling failed")
        return first_line(error)
    return ""


@contextlib.contextmanager
def findable(settings: Settings, port: int, redis_url: str) -> Generator[None, None, None]:
    """A note for `coppice scale` of where the Redis of the service at this port is."""
    note = _note(settings, port)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(redis_url, encoding="utf-8")
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


async def scale(settings: Settings, wanted: Wanted) -> None:
    """Raises StartError when no service is found, or with what went wrong there."""
    url = settings.redis.url or _noted_url(settings)
    client = redis_client(url)
    try:
        outcome = await ScalingCalls(client, settings.ray.namespace).ask(wanted)
    except Unavailable as error:
        raise StartError(f"no service with its Redis at {url}: {error}") from None
    finally:
        await close_client(client)
    if outcome:
        raise StartError(outcome)


def _noted_url(settings: Settings) -> str:
    port = settings.gateway.port
    try:
        return _note(settings, port).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StartError(
            f"no service at port {port} of this machine: start one with `coppice up`, name its "
            "port with --port, or its Redis with --redis-url"
        ) from None


def _note(settings: Settings, port: int) -> Path:
    return settings.cache_dir / "running" / str(port)
