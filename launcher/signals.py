"""Runs the service until it ends or is told to: the first signal stops it, the second kills."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import FrameType

import psutil

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_stoppable(work: Callable[[], Awaitable[int]]) -> int:
    """The exit code of `work`, or 128 + signal when a signal cancelled it.

    `work` may take the cancellation for its regular end, and return a code.
    """
    return asyncio.run(_cancelled_by_signals(work))


async def _cancelled_by_signals(work: Callable[[], Awaitable[int]]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    received: list[int] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        for each in STOPPING:
            loop.remove_signal_handler(each)
            signal.signal(each, kill_all)  # heard even while the loop is busy
        task.cancel()

    for number in STOPPING:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def kill_all(number: int, frame: FrameType | None) -> None:
    """Ends every child and this process at once."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(128 + number)
