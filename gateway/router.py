"""Which verifier and which drafter serve a session, among those that can be reached."""

import asyncio
import logging
import random
from collections.abc import Sequence, Set

import grpc
import grpc.aio

from coppice.errors import CoppiceError, StartError, Unavailable
from gateway.links import DrafterLink, DrafterWorker, VerifierLink, VerifierWorker, Worker
from gateway.prefixes import PrefixMemory
from protos import common_pb2

logger = logging.getLogger(__name__)

METRICS_DEADLINE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
# A cached prefix saves a prefill once, a longer queue costs every step: so many sessions more
# than elsewhere it may cost, or one popular beginning would draw all load to one verifier.
PREFIX_LEAD = 8


class Router:
    """Keeps one channel to every verifier; `ready` is set while any of them is reachable."""

    def __init__(
        self, verifiers: Sequence[VerifierWorker], drafters: Sequence[DrafterWorker]
    ) -> None:
        """With the workers that are known from the start; others may join."""
        self.verifiers = [VerifierLink(worker) for worker in verifiers]
        self.drafters = [DrafterLink(worker) for worker in drafters]
        self._keepers: dict[VerifierLink, asyncio.Task[None]] = {}
        self._target: str | None = None  # hash of what is served
        self._prefixes = PrefixMemory()
        self.ready = asyncio.Event()
        self.away = asyncio.Event()
        self.away.set()

    async def start(self, timeout: float) -> common_pb2.ModelInfo:
        """Connects, and goes on reconnecting. Returns what the first verifier serves.

        Raises StartError when none is reached within `timeout` seconds.
        """
        for link in self.verifiers:
            self._keepers[link] = asyncio.create_task(self._keep(link))
        try:
            await asyncio.wait_for(self.ready.wait(), timeout)
        except TimeoutError:
            names = ", ".join(link.name for link in self.verifiers) or "none configured"
            raise StartError(
                f"no verifier answered within {timeout:g} s ({names}); "
                "see the verifier's log for why it did not start"
            ) from None
        return next(link.info for link in self.verifiers if link.reachable)

    async def close(self) -> None:
        for link in list(self.verifiers):
            await self.drop_verifier(link)

    def add_verifier(self, worker: VerifierWorker) -> VerifierLink:
        """Lets a verifier join while the router runs."""
        link = VerifierLink(worker)
        self.verifiers.append(link)
        self._keepers[link] = asyncio.create_task(self._keep(link))
        return link

    async def drop_verifier(self, link: VerifierLink) -> None:
        """Forgets a verifier, and breaks what still runs over its channel."""
        self.verifiers.remove(link)
        if (keeper := self._keepers.pop(link, None)) is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await link.close()
        self._publish_readiness()

    def add_drafter(self, worker: DrafterWorker) -> DrafterLink:
        link = DrafterLink(worker)
        self.drafters.append(link)
        return link

    @property
    def reachable(self) -> int:
        """How many verifiers can take a session now."""
        return sum(link.reachable for link in self.verifiers)

    def pick_verifier(
        self,
        tokens: Sequence[int] = (),
        excluded: Set[str] = frozenset(),
        fingerprint: str = "",
    ) -> VerifierLink:
        """The verifier for a session that begins with `tokens`: the one that has the longest
        beginning of them, else the less loaded of two random ones.

        One of another numerics fingerprint than the given one, one that is draining or one
        without heartbeats is taken only where there is no other. Raises Unavailable.
        """
        candidates = [v for v in self.verifiers if v.reachable and v.name not in excluded]
        if not candidates:
            raise Unavailable("no verifier is reachable at the moment; try again in a few seconds")
        if fingerprint:
            equal = [v for v in candidates if v.info.numerics_fingerprint == fingerprint]
            candidates = equal or candidates
        candidates = [v for v in candidates if not v.draining] or candidates
        candidates = [v for v in candidates if v.registered] or candidates
        pair = random.sample(candidates, min(2, len(candidates)))
        lesser = min(pair, key=_load)
        addresses = self._prefixes.longest((v.address for v in candidates), tokens)
        holders = [v for v in candidates if v.address in addresses]
        holder = min(holders, key=_load, default=lesser)
        return holder if holder.load.total <= lesser.load.total + PREFIX_LEAD else lesser

    def remember(self, verifier: VerifierLink, tokens: Sequence[int]) -> None:
        """These tokens were computed there: what begins alike had better follow them."""
        self._prefixes.remember(verifier.address, tokens)

    def pick_drafter(
        self, target_hash: str, avoid: DrafterLink | None = None
    ) -> DrafterLink | None:
        """Of the drafters of this target the one with the fewest sessions; one without
        heartbeats, or `avoid`, only where there is no other."""
        return min(
            (link for link in self.drafters if link.fits(target_hash)),
            key=lambda link: (not link.registered, link is avoid, link.load.total),
            default=None,
        )

    async def worker_metrics(self) -> dict[str, str]:
        """The metrics of every worker that answers in time, by its name."""
        workers: list[Worker] = [link.worker for link in self.verifiers]
        workers += [link.worker for link in self.drafters]
        texts = await asyncio.gather(*(_metrics_of(worker) for worker in workers))
        pairs = zip(workers, texts, strict=True)
        return {worker.name: text for worker, text in pairs if text is not None}

    async def _keep(self, link: VerifierLink) -> None:
        """Connects one verifier again and again, until cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await link.connect()
                self._check_target(link)
            except (CoppiceError, TimeoutError, grpc.aio.AioRpcError) as error:
                link.reachable = False
                logger.info("verifier away", extra={"verifier": link.name, "error": str(error)})
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            self._publish_readiness()
            await link.until_lost()
            logger.warning("verifier lost", extra={"verifier": link.name})
            self._publish_readiness()

    def _check_target(self, link: VerifierLink) -> None:
        """The first verifier says what is served. Raises Unavailable for any other target."""
        if self._target is None:
            self._target = link.info.target_hash
        elif link.info.target_hash != self._target:
            raise Unavailable(
                f"verifier {link.name} has target {link.info.target_hash}, "
                f"the gateway serves {self._target}; start it with the same model"
            )

    def _publish_readiness(self) -> None:
        now, before = (self.ready, self.away) if self.reachable else (self.away, self.ready)
        before.clear()
        now.set()


def _load(link: VerifierLink) -> int:
    return link.load.total


async def _metrics_of(worker: Worker) -> str | None:
    try:
        return await asyncio.wait_for(worker.metrics(), METRICS_DEADLINE_SECONDS)
    except (CoppiceError, TimeoutError):
        return None
