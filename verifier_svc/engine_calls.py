"""From an event loop to the engine's thread and back, within a bound of time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from coppice.errors import Unavailable
from verifier_svc.engine import Engine
from verifier_svc.session import StepEvent

_ENGINE_SECONDS = 60.0

T = TypeVar("T")


async def on_engine(engine: Engine, work: Callable[[], T]) -> T:
    """The result of `work` run on the engine's thread, or what it raised. Raises Unavailable when
    the engine is stuck."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            loop.call_soon_threadsafe(finish, None, error)
        else:
            loop.call_soon_threadsafe(finish, result, None)

    engine.post(run)
    return await within(_ENGINE_SECONDS, future, "the engine does not respond")


async def next_event(engine: Engine, events: "asyncio.Queue[StepEvent]") -> StepEvent:
    """A session's next event. It may take long to come, but never from a dead engine. Raises what
    ended the session."""
    while True:
        try:
            event = await within(_ENGINE_SECONDS, events.get(), "no event")
        except Unavailable:
            await on_engine(engine, lambda: None)
            continue
        if event.error is not None:
            raise event.error
        return event


async def within(seconds: float, work: Awaitable[T], complaint: str) -> T:
    """Raises Unavailable when `work` takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Unavailable(f"{complaint} within {seconds:g} s") from None
