"""The verifier as a Ray actor: placement, restarts and control calls only."""

import asyncio
import os

from coppice.settings import Settings
from coppice.telemetry import configure_logging
from verifier_svc.engine import Timings
from verifier_svc.service import VerifierService


class VerifierWorker:
    """Wrapped by `ray.remote` where it is placed. The model is loaded at construction, so that a
    restarted actor is whole again."""

    def __init__(self, settings: Settings, name: str, host: str | None = None) -> None:
        configure_logging(name, settings.log_level)
        self._service = VerifierService(settings, name)
        self._host = host
        self._starting = asyncio.Lock()
        self._address: str | None = None

    async def ready(self) -> str:
        """The address "host:port" of the gRPC server, which the first call starts."""
        async with self._starting:
            if self._address is None:
                # A crashed engine takes the process along, and Ray starts a new one.
                self._address = await self._service.start(
                    self._host or _node_ip(), on_crash=lambda: os._exit(1)
                )
        return self._address

    async def model_info(self) -> bytes:
        """A serialized ModelInfo."""
        return self._service.info.SerializeToString()

    async def metrics(self) -> str:
        return self._service.metrics.text()

    async def timings(self) -> Timings:
        """Where the engine's time has gone so far; for benchmarks."""
        return self._service.engine.timings

    async def stop(self, grace_seconds: float = 0.0) -> None:
        await self._service.stop(grace_seconds)


def _node_ip() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
