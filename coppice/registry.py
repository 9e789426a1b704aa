"""Which workers there are: each says so in Redis again and again, and is forgotten when it stops.

Imports no torch.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

from redis.asyncio import Redis

from coppice.background import forever
from coppice.errors import CoppiceError
from coppice.redis_calls import close_client, redis_client, run_calls

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
EXPIRY_SECONDS = 5.0  # some heartbeats may be late


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says of itself. Its name is that of its Ray actor."""

    name: str
    kind: Literal["verifier", "drafter"]
    target_hash: str  # of a drafter: of the only target that it fits; empty: any
    address: str  # "host:port" of a verifier's gRPC server
    sessions: int  # running and waiting
    state: Literal["serving", "draining", "left"] = "serving"


class Registry:
    """An expiring key per worker, and a set of their names. Services that share a Redis are kept
    apart by their Ray namespace.

    Every method raises Unavailable when Redis is away.
    """

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._names_key = f"coppice:workers:{namespace}"

    async def close(self) -> None:
        await close_client(self._client)

    async def put(self, record: WorkerRecord) -> None:
        """Registers the worker until its next heartbeat is long overdue."""
        async with self._client.pipeline(transaction=True) as calls:
            expiry = int(EXPIRY_SECONDS * 1000)
            calls.set(self._key(record.name), json.dumps(asdict(record)), px=expiry)
            calls.sadd(self._names_key, record.name)
            calls.pexpire(self._names_key, expiry)
            await run_calls(calls)

    async def all(self) -> dict[str, WorkerRecord]:
        """The workers whose heartbeats come, and those that left just now, by name."""
        async with self._client.pipeline(transaction=False) as calls:
            calls.smembers(self._names_key)
            names = [name.decode() for name in (await run_calls(calls))[0]]
        if not names:
            return {}
        async with self._client.pipeline(transaction=False) as calls:
            calls.mget([self._key(name) for name in names])
            found = (await run_calls(calls))[0]
        records = zip(names, found, strict=True)
        return {name: WorkerRecord(**json.loads(text)) for name, text in records if text}

    def _key(self, name: str) -> str:
        return f"{self._names_key}:{name}"


class Heartbeat:
    """Registers one worker as long as it can say how loaded it is."""

    def __init__(
        self, url: str | None, namespace: str, record: Callable[[], Awaitable[WorkerRecord]]
    ) -> None:
        """`record` has to come from where the work is done, so that a worker which is stuck does
        not pass for alive. Without `url` nobody is told."""
        self._registry = Registry(redis_client(url), namespace) if url is not None else None
        self._record = record
        self._last: WorkerRecord | None = None
        self._draining = False
        self._away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._registry is not None and self._task is None:
            beat = partial(self._beat, self._registry)
            self._task = asyncio.create_task(forever(beat, HEARTBEAT_SECONDS), name="heartbeat")

    async def drain(self) -> None:
        """Says at once that no new sessions are wanted."""
        self._draining = True
        if self._registry is not None and self._task is not None:
            await self._beat(self._registry)

    async def stop(self) -> None:
        """Says that the worker has left, which silence does not: it may restart."""
        if self._registry is None or self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._last is not None:
            await self._put(self._registry, replace(self._last, sessions=0, state="left"))
        await self._registry.close()

    async def _beat(self, registry: Registry) -> None:
        try:
            async with asyncio.timeout(EXPIRY_SECONDS):
                record = await self._record()
        except (CoppiceError, TimeoutError) as error:
            logger.warning("no heartbeat: %s", error)
            return
        self._last = replace(record, state="draining" if self._draining else "serving")
        await self._put(registry, self._last)

    async def _put(self, registry: Registry, record: WorkerRecord) -> None:
        try:
            await registry.put(record)
        except CoppiceError as error:
            if not self._away:  # once, not every second
                logger.warning("registry: %s", error)
            self._away = True
        else:
            self._away = False
