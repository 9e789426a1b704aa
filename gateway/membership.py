"""Keeps the router in step with the registry: workers join and leave while traffic runs."""

import logging
import time
from collections.abc import Callable

from coppice.background import forever
from coppice.errors import Unavailable
from coppice.registry import EXPIRY_SECONDS, HEARTBEAT_SECONDS, Registry, WorkerRecord
from gateway.links import DrafterWorker, VerifierWorker
from gateway.router import Router

logger = logging.getLogger(__name__)


class Membership:
    """While Redis is away the router keeps the workers that it knows. So does it until they have
    had the time to register again in one that came back empty."""

    def __init__(
        self,
        router: Router,
        registry: Registry,
        verifier: Callable[[str], VerifierWorker],
        drafter: Callable[[str], DrafterWorker],
    ) -> None:
        """`verifier` and `drafter` reach a worker by its name."""
        self._router = router
        self._registry = registry
        self._verifier = verifier
        self._drafter = drafter
        self._seen: set[str] = set()  # others were known from the start, and may never register
        self._complete_from = 0.0
        self.redis_reachable = True

    async def follow(self, on_error: Callable[[], object]) -> None:
        """Refreshes until cancelled; `on_error` is called whenever Redis is away."""

        async def refresh() -> None:
            try:
                await self.refresh()
            except Unavailable as error:
                if self.redis_reachable:
                    logger.warning("registry away", extra={"error": str(error)})
                self.redis_reachable = False
                self._complete_from = time.monotonic() + EXPIRY_SECONDS
                on_error()
            else:
                self.redis_reachable = True

        await forever(refresh, HEARTBEAT_SECONDS)

    async def close(self) -> None:
        await self._registry.close()

    async def refresh(self) -> None:
        """Raises Unavailable when Redis is away."""
        records = await self._registry.all()
        here = {name: record for name, record in records.items() if record.state != "left"}
        gone = records.keys() - here.keys()
        self._seen |= here.keys()
        for link in list(self._router.verifiers):
            if link.name in gone:
                await self._router.drop_verifier(link)
        for link in list(self._router.drafters):
            if link.name in gone:
                self._router.drafters.remove(link)
        for record in here.values():
            if record.kind == "verifier":
                self._update_verifier(record)
            else:
                self._update_drafter(record)
        if time.monotonic() >= self._complete_from:
            # Silent ones may be restarting: they are kept for when there is no other.
            for link in (*self._router.verifiers, *self._router.drafters):
                link.registered = link.name in here or link.name not in self._seen

    def _update_verifier(self, record: WorkerRecord) -> None:
        known = (link for link in self._router.verifiers if link.name == record.name)
        link = next(known, None)
        if link is None:
            logger.info("verifier joins", extra={"verifier": record.name})
            link = self._router.add_verifier(self._verifier(record.name))
        link.draining = record.state == "draining"
        link.load.report(record.sessions)

    def _update_drafter(self, record: WorkerRecord) -> None:
        known = (link for link in self._router.drafters if link.name == record.name)
        link = next(known, None)
        if link is None:
            logger.info("drafter joins", extra={"drafter": record.name})
            link = self._router.add_drafter(self._drafter(record.name))
        link.target_hash = record.target_hash
        link.load.report(record.sessions)
