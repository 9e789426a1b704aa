"""How every service talks to Redis: bounded in time, never retried, with errors of our own."""

from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coppice.errors import Unavailable, first_line

CALL_TIMEOUT_SECONDS = 1.0
MAX_CONNECTIONS = 64


def redis_client(url: str) -> Redis:
    """A client that connects when it is used. Raises ValueError when `url` is none."""
    # An append that is tried twice could log a token twice, hence no retries.
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=CALL_TIMEOUT_SECONDS,
        socket_timeout=CALL_TIMEOUT_SECONDS,
        socket_connect_timeout=CALL_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis(connection_pool=pool)


async def close_client(client: Redis) -> None:
    await client.aclose()
    await client.connection_pool.disconnect()


async def run_calls(calls: Pipeline) -> list[Any]:
    """The answers to all calls. Raises Unavailable when Redis is away."""
    try:
        return await calls.execute()
    except (RedisError, OSError) as error:
        raise Unavailable(
            f"the session store (Redis) is away ({one_line(error)}); try again in a few seconds"
        ) from error


def one_line(error: Exception) -> str:
    return first_line(error).rstrip(".")
