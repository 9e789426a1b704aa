"""Sessions and their committed tokens in Redis, for other gateways to find."""

import logging
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from coppice.errors import StartError, Unavailable
from coppice.redis_calls import close_client, one_line, redis_client, run_calls

logger = logging.getLogger(__name__)

LIVE_KEY = "coppice:sessions"
RENEW_PART = 0.25  # of a session's time, after which it gets all of it again


def session_key(session_id: str) -> str:
    return f"coppice:session:{session_id}"


def log_key(session_id: str) -> str:
    return f"coppice:session:{session_id}:tokens"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """All that another gateway needs to run the session again, beside its log."""

    session_id: str
    epoch: int
    seed: int
    model: str
    verifier: str
    numerics_fingerprint: str
    params: str  # JSON
    prompt: tuple[int, ...]


class SessionStore:
    """A hash per session (the prompt as little-endian uint32), a list per log (one element per
    token) and one set of the running sessions by their expiry. All expire.

    Every method raises Unavailable when Redis is away.
    """

    def __init__(self, client: Redis, ttl_seconds: int) -> None:
        self._client = client
        self._ttl = ttl_seconds

    @property
    def renew_seconds(self) -> float:
        """How often a log is to ask for its time anew: not at every token, which would be most of
        what a token costs here."""
        return RENEW_PART * self._ttl

    @classmethod
    async def connect(cls, url: str, ttl_seconds: int) -> Self:
        """Raises StartError when no Redis answers at `url`."""
        try:
            client = redis_client(url)
            await client.execute_command("PING")
        except (RedisError, OSError, ValueError) as error:
            raise StartError(
                f"no Redis at {url} ({one_line(error)}); start one there, correct redis.url, "
                "or leave it out for the embedded server"
            ) from None
        return cls(client, ttl_seconds)

    async def close(self) -> None:
        await close_client(self._client)

    async def register(self, record: SessionRecord) -> None:
        """Writes a session that is about to run; the same session again replaces it."""
        fields: dict[Any, str | bytes | int] = {
            "state": "running",
            "epoch": record.epoch,
            "seed": str(record.seed),
            "model": record.model,
            "verifier": record.verifier,
            "numerics_fingerprint": record.numerics_fingerprint,
            "params": record.params,
            "prompt": pack_tokens(record.prompt),
        }
        async with self._client.pipeline(transaction=True) as calls:
            calls.hset(session_key(record.session_id), mapping=fields)
            calls.expire(session_key(record.session_id), self._ttl)
            calls.zadd(LIVE_KEY, {record.session_id: time.time() + self._ttl})
            calls.expire(LIVE_KEY, self._ttl)
            await run_calls(calls)

    async def append(self, session_id: str, tokens: Sequence[int], renew: bool) -> None:
        """Adds committed tokens to the log; with `renew`, gives the session its full time again."""
        async with self._client.pipeline(transaction=renew) as calls:
            calls.rpush(log_key(session_id), *tokens)
            if renew:
                calls.expire(log_key(session_id), self._ttl)
                calls.expire(session_key(session_id), self._ttl)
                calls.zadd(LIVE_KEY, {session_id: time.time() + self._ttl})
                calls.expire(LIVE_KEY, self._ttl)
            await run_calls(calls)

    async def finish(self, session_id: str) -> None:
        """Marks the answer as complete. It stays readable until it expires."""
        async with self._client.pipeline(transaction=True) as calls:
            calls.hset(session_key(session_id), "state", "finished")
            calls.expire(session_key(session_id), self._ttl)
            calls.expire(log_key(session_id), self._ttl)
            calls.zrem(LIVE_KEY, session_id)
            await run_calls(calls)

    async def remove(self, session_id: str) -> None:
        async with self._client.pipeline(transaction=True) as calls:
            calls.delete(session_key(session_id), log_key(session_id))
            calls.zrem(LIVE_KEY, session_id)
            await run_calls(calls)

    async def count(self) -> int:
        """Running sessions of all gateways; those of a dead gateway count until they expire."""
        async with self._client.pipeline(transaction=True) as calls:
            calls.zremrangebyscore(LIVE_KEY, "-inf", time.time())
            calls.zcard(LIVE_KEY)
            return (await run_calls(calls))[1]


class SessionLog:
    """The record of one session while it streams.

    It falls silent at the first failure, since a log with a gap is worse than none, and a stream
    must not wait for a dead Redis at every token.
    """

    def __init__(
        self, store: SessionStore, session_id: str, on_error: Callable[[], object]
    ) -> None:
        self._store = store
        self._session_id = session_id
        self._on_error = on_error
        self._complete = True
        self._renew_at = -math.inf  # of time.monotonic

    async def register(self, record: SessionRecord) -> None:
        """Without Redis the answer comes all the same; only resuming it elsewhere is lost."""
        if not self._complete:
            return
        try:
            await self._store.register(record)
        except Unavailable as error:
            self._fail(error)

    async def append(self, tokens: Sequence[int]) -> None:
        if not self._complete or not tokens:
            return
        now = time.monotonic()
        renew = now >= self._renew_at
        try:
            await self._store.append(self._session_id, tokens, renew)
        except Unavailable as error:
            self._fail(error)
        if renew:
            self._renew_at = now + self._store.renew_seconds

    async def close(self, finished: bool) -> None:
        """Keeps the record of a finished answer for a while, and removes any other."""
        try:
            if finished and self._complete:
                await self._store.finish(self._session_id)
            else:
                await self._store.remove(self._session_id)
        except Unavailable as error:
            self._fail(error)

    def _fail(self, error: Unavailable) -> None:
        self._complete = False
        self._on_error()
        logger.warning("session log", extra={"session": self._session_id, "error": str(error)})


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)
