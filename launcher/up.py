"""`coppice up`: the whole on this machine until a signal."""

import asyncio
import contextlib

from rich.console import Console

from coppice.settings import Settings
from launcher.compose import Running, service
from launcher.terminal import steps


async def up(settings: Settings, console: Console) -> int:
    """Serves until cancelled. The ready line goes to stdout, all else to `console`."""
    async with contextlib.AsyncExitStack() as parts:
        with steps(console) as shown:
            running = await parts.enter_async_context(service(settings, shown))
        print(ready_line(running), flush=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            console.print("stopping", style="dim")
    return 0


def ready_line(running: Running) -> str:
    model = running.model
    return (
        f"ready: gRPC at {running.address}, metrics at http://{running.http_address}/metrics, "
        f"model {model.model} ({model.dtype}, context {model.max_context}), "
        f"drafter {running.drafter}, {running.seconds:.1f} s after the start"
    )
