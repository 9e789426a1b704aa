"""The workers of the router as Ray actors. Ray carries control calls only."""

from typing import Any

from ray.exceptions import RayError, RayTaskError

from coppice.errors import Unavailable


class RayVerifier:
    """A verifier actor: `ready() -> "host:port"` and `metrics() -> str`."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    async def ready(self) -> str:
        return str(await _result(self.name, self._handle.ready.remote()))

    async def metrics(self) -> str:
        return str(await _result(self.name, self._handle.metrics.remote()))


class RayDrafter:
    """A drafter actor: `attach(session_id, verifier_address, epoch)` and `metrics() -> str`."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        await _result(self.name, self._handle.attach.remote(session_id, verifier_address, epoch))

    async def metrics(self) -> str:
        return str(await _result(self.name, self._handle.metrics.remote()))


async def _result(name: str, reference: Any) -> Any:
    """What an actor call returns; its callers bound the time. Raises Unavailable."""
    try:
        return await reference
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        raise Unavailable(f"worker {name} failed: {reason[0]}") from error
