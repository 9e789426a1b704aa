"""What goes on in the background goes on after errors, and ends when it is cancelled."""

import asyncio
import logging

import pytest

from coppice.background import forever


async def test_work_that_fails_is_said_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()
    tries: list[int] = []

    async def work() -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise KeyError("unforeseen")
        done.set()

    task = asyncio.create_task(forever(work, 0.001))
    with caplog.at_level(logging.ERROR):
        await asyncio.wait_for(done.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert [record.message.endswith("work failed") for record in caplog.records] == [True, True]
