"""The workers of one service: placed, kept serving, and more or fewer of them when asked."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import chain

from ray.exceptions import RayError

from coppice.background import forever
from coppice.settings import Settings
from launcher.cluster import Worker, place_drafter, place_verifier, stop, until_ready

SUPERVISE_SECONDS = 2.0


class Fleet:
    """Workers are named by kind and number: the highest numbers go first, free ones come first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._verifiers: dict[str, Worker] = {}
        self._drafters: dict[str, Worker] = {}

    @property
    def verifier_names(self) -> list[str]:
        return list(self._verifiers)

    @property
    def drafter_names(self) -> list[str]:
        return list(self._drafters)

    async def resize(self, verifiers: int, drafters: int, grace_seconds: float) -> None:
        """Places what is missing and, once that is ready, stops what is too many; its running
        sessions have so many seconds to end, and are opened elsewhere then.

        Raises StartError with a worker's own message; then nothing has changed.
        """
        placed: list[Worker] = []
        try:
            for worker in chain(
                self._place("verifier", self._verifiers, verifiers, place_verifier),
                self._place("drafter", self._drafters, drafters, place_drafter),
            ):
                placed.append(worker)
            await asyncio.gather(*(until_ready(worker) for worker in placed))
        except BaseException:
            await self._remove(placed, 0.0)
            raise
        surplus = [*_beyond(self._verifiers, verifiers), *_beyond(self._drafters, drafters)]
        await self._remove(surplus, grace_seconds)

    async def supervise(self) -> None:
        """Sees to it that workers serve again, and register, after Ray has restarted them."""
        for worker in (*self._verifiers.values(), *self._drafters.values()):
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(SUPERVISE_SECONDS):
                    await worker.handle.ready.remote()

    async def stop(self) -> None:
        await self._remove([*self._verifiers.values(), *self._drafters.values()], 0.0)

    def _place(
        self,
        kind: str,
        workers: dict[str, Worker],
        wanted: int,
        place: Callable[[Settings, str], Worker],
    ) -> Iterator[Worker]:
        missing = max(0, wanted - len(workers))
        names = (f"{kind}-{number}" for number in range(len(workers) + missing))
        for name in [name for name in names if name not in workers][:missing]:
            workers[name] = place(self._settings, name)
            yield workers[name]

    async def _remove(self, workers: list[Worker], grace_seconds: float) -> None:
        for worker in workers:
            self._verifiers.pop(worker.name, None)
            self._drafters.pop(worker.name, None)
        await asyncio.gather(*(stop(worker, grace_seconds) for worker in workers))


def _beyond(workers: dict[str, Worker], wanted: int) -> list[Worker]:
    """Those with the highest numbers."""
    numbered = sorted(workers.values(), key=lambda worker: int(worker.name.rpartition("-")[2]))
    return numbered[wanted:]


@contextlib.asynccontextmanager
async def running_fleet(settings: Settings) -> AsyncGenerator[Fleet, None]:
    """As many workers as the settings say, ready; all are stopped at the end. Raises StartError
    with a worker's own message."""
    fleet = Fleet(settings)
    drafters = 0 if settings.speculation.drafter == "none" else settings.drafter.count
    try:
        await fleet.resize(settings.verifier.count, drafters, 0.0)
        supervising = asyncio.create_task(forever(fleet.supervise, SUPERVISE_SECONDS))
        try:
            yield fleet
        finally:
            supervising.cancel()
    finally:
        await fleet.stop()
