"""Keeps a drafter attached to one session, beside the token path and never in it."""

import asyncio
import logging
import time

from coppice.errors import CoppiceError
from gateway.links import DrafterLink, VerifierLink
from gateway.router import Router
from protos import verifier_pb2

logger = logging.getLogger(__name__)

ATTACH_DEADLINE_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
SETTLE_SECONDS = 5.0  # what a drafter that took the session gets to join it
MAX_ATTEMPTS = 40  # of one request; with the pauses, more than a minute


class Attachment:
    """Asks drafters to join until one does. Every attempt has a higher epoch than the one before,
    so that whatever a given-up drafter still sends is ignored."""

    def __init__(self, router: Router, session_id: str) -> None:
        self._router = router
        self._session_id = session_id
        self._verifier_address = ""
        self._target_hash = ""
        self.epoch = 0  # the highest that was used
        self._attempts_left = MAX_ATTEMPTS
        self._state = verifier_pb2.DRAFTER_STATE_UNSPECIFIED
        self._drafter: DrafterLink | None = None
        self._keeps_drafter = False
        self._settled_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def open(self, verifier: VerifierLink, epoch: int) -> None:
        """The session runs at this verifier from now on, its `Run` with this epoch. A drafter
        that served it well elsewhere has its draft KV still, and is asked first."""
        self.stop()
        self._verifier_address = verifier.address
        self._target_hash = verifier.info.target_hash
        self.epoch = epoch
        self._keeps_drafter = self._state == verifier_pb2.DRAFTER_STATE_JOINED
        self._state = verifier_pb2.DRAFTER_STATE_UNSPECIFIED
        self._settled_at = 0.0

    def observe(self, state: verifier_pb2.DrafterState.ValueType) -> None:
        """Takes what the verifier says of the drafter, and starts an attempt where one is due."""
        lost = verifier_pb2.DRAFTER_STATE_LOST
        newly_lost = state == lost and self._state != lost
        self._state = state
        if state == verifier_pb2.DRAFTER_STATE_JOINED:
            return
        if self._task is not None and not self._task.done():
            return
        if newly_lost or time.monotonic() >= self._settled_at:
            self._task = asyncio.create_task(self._attach())

    def stop(self) -> None:
        """Asks nobody any more, until the session is open again."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        self.stop()
        self._hold(None)

    async def _attach(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while self._attempts_left > 0:
            self._attempts_left -= 1
            self.epoch += 1
            drafter = self._drafter
            if drafter is None or not (self._keeps_drafter and drafter.registered):
                drafter = self._router.pick_drafter(self._target_hash, avoid=drafter)
            self._keeps_drafter = False
            if drafter is None:
                return
            self._hold(drafter)
            try:
                async with asyncio.timeout(ATTACH_DEADLINE_SECONDS):
                    await drafter.worker.attach(
                        self._session_id, self._verifier_address, self.epoch
                    )
            except (CoppiceError, TimeoutError) as error:
                fields = {"session": self._session_id, "epoch": self.epoch, "error": str(error)}
                logger.info("drafter not attached", extra=fields)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self._settled_at = time.monotonic() + SETTLE_SECONDS
                return

    def _hold(self, drafter: DrafterLink | None) -> None:
        """Counts the session at the drafter that serves it."""
        if self._drafter is not None:
            self._drafter.load.own -= 1
        if drafter is not None:
            drafter.load.own += 1
        self._drafter = drafter
