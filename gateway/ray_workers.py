"""The workers of the router as Ray actors. Ray carries control calls only."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from coppice.errors import Unavailable, first_line


class RayWorker:
    """An actor by its name, which is looked up when it is needed first, and again whenever a call
    has failed: another actor may have the name by then."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._namespace = namespace
        self._handle: Any = None  # Ray's actor handle has no static type

    async def metrics(self) -> str:
        return str(await self._call("metrics"))

    async def _call(self, method: str, *arguments: Any) -> Any:
        """What an actor call returns; its callers bound the time. Raises Unavailable."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(ray.get_actor, self.name, self._namespace)
            return await getattr(self._handle, method).remote(*arguments)
        except (RayError, ValueError) as error:
            self._handle = None
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise Unavailable(f"worker {self.name} failed: {first_line(cause)}") from error


class RayVerifier(RayWorker):
    """A verifier actor: `ready() -> "host:port"` and `metrics() -> str`."""

    async def ready(self) -> str:
        return str(await self._call("ready"))


class RayDrafter(RayWorker):
    """A drafter actor: `attach(session_id, verifier_address, epoch)` and `metrics() -> str`."""

    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        await self._call("attach", session_id, verifier_address, epoch)
