"""The drafter as a Ray actor: placement, restarts and control calls only."""

from coppice.registry import Heartbeat, WorkerRecord
from coppice.settings import Settings
from coppice.telemetry import configure_logging
from drafter_svc.service import DrafterService


class DrafterWorker:
    """Wrapped by `ray.remote` where it is placed. The head is loaded at construction, so that a
    restarted actor is whole again."""

    def __init__(self, settings: Settings, name: str = "drafter-0") -> None:
        configure_logging(name, settings.log_level)
        self._service = DrafterService.from_settings(settings, name)
        self._name = name
        url, namespace = settings.redis.url, settings.ray.namespace
        self._heartbeat = Heartbeat(url, namespace, self._record)

    async def ready(self) -> str:
        """The identity of the head."""
        self._service.start()
        self._heartbeat.start()
        return self._service.identity

    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        """See `DrafterService.attach`."""
        self._service.start()
        await self._service.attach(session_id, verifier_address, epoch)

    async def detach(self, session_id: str) -> None:
        await self._service.detach(session_id)

    async def metrics(self) -> str:
        """Prometheus text."""
        return self._service.metrics()

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Its sessions go on plainly at once, until other drafters have joined them."""
        await self._heartbeat.stop()
        await self._service.stop()

    async def _record(self) -> WorkerRecord:
        service = self._service
        return WorkerRecord(self._name, "drafter", service.target_hash, "", service.sessions)
