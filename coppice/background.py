"""Work that goes on beside everything else, and that nobody waits for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


async def forever(work: Callable[[], Awaitable[object]], pause_seconds: float) -> None:
    """Does `work` again and again until cancelled. One that fails is logged and is not the last:
    a task that ends for an error which nobody reads leaves a service that only looks whole."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("%s failed", getattr(work, "__qualname__", work))
        await asyncio.sleep(pause_seconds)
