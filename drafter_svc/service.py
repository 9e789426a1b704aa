"""A drafter worker as one object: the drafter, its engine and a client for each verifier.

Usable without Ray; `actor.py` is its thin cover.
"""

import gc

from coppice.models.hub import resolve_model
from coppice.models.loading import target_hash
from coppice.settings import Settings
from drafter_svc.building import build_drafter
from drafter_svc.drafter import Drafter, Features
from drafter_svc.engine import DraftEngine
from drafter_svc.telemetry import DraftMetrics
from drafter_svc.verifier_client import Deadlines, VerifierClient
from drafter_svc.wire import hello
from kernels import ops


class DrafterService:
    """`start`, then `attach` sessions, then `stop`; all on one event loop."""

    def __init__(
        self,
        drafter: Drafter,
        name: str = "drafter-0",
        deadlines: Deadlines | None = None,
        target_hash: str = "",
    ) -> None:
        """`target_hash`: of the only target that the drafter fits; empty: any of its sizes."""
        self._metrics = DraftMetrics()
        self._hello = hello(drafter, name, target_hash)
        self._deadlines = deadlines
        self._engine = DraftEngine(drafter, self._metrics)
        self._clients: dict[str, VerifierClient] = {}
        self._started = False

    @classmethod
    def from_settings(cls, settings: Settings, name: str = "drafter-0") -> "DrafterService":
        """Loads what the settings ask for. Raises StartError with one line when that fails."""
        ops.set_threads(settings.drafter.threads)
        drafter = build_drafter(settings)
        # What was loaded stays: the collector need not look through it again and again.
        gc.freeze()
        target = ""
        if drafter.features is not Features.NONE:
            target = target_hash(resolve_model(settings.model.path, settings.cache_dir))
        return cls(drafter, name, target_hash=target)

    @property
    def identity(self) -> str:
        """Of the head, for logs."""
        return self._hello.head

    @property
    def target_hash(self) -> str:
        """Of the only target that it fits; empty: any of its sizes."""
        return self._hello.target_hash

    @property
    def sessions(self) -> int:
        """How many are attached."""
        return self._engine.sessions

    def start(self) -> None:
        """Idempotent; needs a running event loop."""
        if not self._started:
            self._started = True
            self._engine.start()

    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        """Joins the session at a verifier; an earlier attachment of it is left. An epoch that is
        not above the known one is ignored. Raises FailedPrecondition while head and target are
        known to misfit."""
        self._engine.attach(session_id, epoch, await self._client(verifier_address))

    async def detach(self, session_id: str) -> None:
        """Leaves the session, if it is attached."""
        self._engine.detach(session_id)

    def metrics(self) -> str:
        """Prometheus text."""
        return self._metrics.exposition()

    async def stop(self) -> None:
        """Ends all streams, tasks and the drafting thread."""
        clients = list(self._clients.values())
        self._clients.clear()
        for client in clients:
            await client.close()
        await self._engine.close()

    async def _client(self, address: str) -> VerifierClient:
        """The client of a verifier. Restarted verifiers have new addresses: idle clients go."""
        for known in [a for a, client in self._clients.items() if client.idle and a != address]:
            await self._clients.pop(known).close()
        client = self._clients.get(address)
        if client is None:
            client = VerifierClient(address, self._hello, self._engine, self._deadlines)
            self._clients[address] = client
        return client
