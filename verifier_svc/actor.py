"""The verifier as a Ray actor: placement, restarts and control calls only."""

import asyncio
import os

from coppice.registry import Heartbeat, WorkerRecord
from coppice.settings import Settings
from coppice.telemetry import configure_logging
from verifier_svc.followers import Followers, meeting_address, node_address
from verifier_svc.metrics import Timings
from verifier_svc.service import VerifierService

_TELL_SECONDS = 1.0


class VerifierWorker:
    """Wrapped by `ray.remote` where it is placed. The model is loaded at construction, so that a
    restarted actor is whole again."""

    def __init__(self, settings: Settings, name: str, host: str | None = None) -> None:
        configure_logging(name, settings.log_level)
        self._followers = Followers(settings, name)
        self._service = VerifierService(settings, name, meeting_address(settings.verifier))
        self._host = host
        self._starting = asyncio.Lock()
        self._address: str | None = None
        self._name = name
        url, namespace = settings.redis.url, settings.ray.namespace
        self._heartbeat = Heartbeat(url, namespace, self._record)

    async def ready(self) -> str:
        """The address "host:port" of the gRPC server, which the first call starts."""
        async with self._starting:
            if self._address is None:
                self._address = await self._start()
                self._heartbeat.start()
        return self._address

    async def _start(self) -> str:
        ranks, host = self._service.ranks, self._host or node_address()
        if ranks is None:
            return await self._service.start(host, _end)
        try:
            await self._followers.join(ranks, self._service.info, _end)
            return await self._service.start(host, _end)
        except Exception:
            # Of use is a whole group alone. Whoever waits hears why before Ray starts another.
            asyncio.get_running_loop().call_later(_TELL_SECONDS, _end)
            raise

    async def model_info(self) -> bytes:
        """A serialized ModelInfo."""
        return self._service.info.SerializeToString()

    async def metrics(self) -> str:
        return self._service.metrics.text()

    async def timings(self) -> Timings:
        """Where the engine's time has gone so far; for benchmarks."""
        return self._service.engine.timings

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Takes no more sessions, gives the running ones `grace_seconds`, closes the rest."""
        await self._heartbeat.drain()
        self._followers.expect_end()
        await self._service.stop(grace_seconds)
        await self._heartbeat.stop()

    async def _record(self) -> WorkerRecord:
        sessions = await self._service.sessions()
        target = self._service.info.target_hash
        return WorkerRecord(self._name, "verifier", target, self._address or "", sessions)


def _end() -> None:
    """Of a crashed engine, or a group that lacks a rank. Ray starts a new process."""
    os._exit(1)
