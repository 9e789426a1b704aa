"""Which verifier and which drafter serve a session, and which of them can be reached."""

import asyncio
import logging
import random
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from coppice.errors import CoppiceError, StartError, Unavailable
from protos import common_pb2, verifier_pb2
from protos.verifier_pb2_grpc import VerifierStub

if TYPE_CHECKING:  # only the stub files know it
    from protos.verifier_pb2_grpc import VerifierAsyncStub

logger = logging.getLogger(__name__)

READY_DEADLINE_SECONDS = 30.0
METRICS_DEADLINE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.max_receive_message_length", 16 << 20),
)


class Worker(Protocol):
    """A process behind the gateway. Every call raises Unavailable when it is away."""

    @property
    def name(self) -> str: ...
    async def metrics(self) -> str: ...


class VerifierWorker(Worker, Protocol):
    async def ready(self) -> str:
        """Its gRPC address, "host:port", once it serves. A restarted one has another."""
        ...


class DrafterWorker(Worker, Protocol):
    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        """Has the drafter join the session over its own stream to that verifier."""
        ...


class VerifierLink:
    """One verifier as the router sees it: its channel, its identity and its load."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.address = ""
        self.inflight = 0
        self.reachable = False
        self.info = common_pb2.ModelInfo()
        self._channel: grpc.aio.Channel | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def stub(self) -> "VerifierAsyncStub":
        if self._channel is None:
            raise Unavailable(f"verifier {self.name} has not been reached yet; try again")
        return VerifierStub(self._channel)

    async def connect(self) -> None:
        """Asks the worker for its address and the address for its model.

        Raises Unavailable, TimeoutError or AioRpcError.
        """
        async with asyncio.timeout(READY_DEADLINE_SECONDS):
            address = await self.worker.ready()
            if address != self.address:
                await self.close()
                self.address = address
                self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            self.info = await self.stub.GetModelInfo(verifier_pb2.GetVerifierInfoRequest())
        self.reachable = True

    async def until_lost(self) -> None:
        """Returns when the connection broke."""
        assert self._channel is not None
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
        self.reachable = False

    async def close(self) -> None:
        self.reachable = False
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


class DrafterLink:
    """One drafter as the router sees it, with the sessions that this gateway gave it."""

    def __init__(self, worker: DrafterWorker) -> None:
        self.worker = worker
        self.attached = 0


class Router:
    """Keeps one channel to every verifier; `ready` is set while any of them is reachable."""

    def __init__(
        self, verifiers: Sequence[VerifierWorker], drafters: Sequence[DrafterWorker]
    ) -> None:
        self._verifiers = [VerifierLink(worker) for worker in verifiers]
        self._drafters = [DrafterLink(worker) for worker in drafters]
        self._tasks: list[asyncio.Task[None]] = []
        self.ready = asyncio.Event()
        self.away = asyncio.Event()
        self.away.set()

    async def start(self, timeout: float) -> common_pb2.ModelInfo:
        """Connects, and goes on reconnecting. Returns what the first verifier serves.

        Raises StartError when none is reached within `timeout` seconds.
        """
        self._tasks = [asyncio.create_task(self._keep(link)) for link in self._verifiers]
        try:
            await asyncio.wait_for(self.ready.wait(), timeout)
        except TimeoutError:
            names = ", ".join(link.name for link in self._verifiers) or "none configured"
            raise StartError(
                f"no verifier answered within {timeout:g} s ({names}); "
                "see the verifier's log for why it did not start"
            ) from None
        return next(link.info for link in self._verifiers if link.reachable)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._verifiers:
            await link.close()
        self._publish_readiness()

    @property
    def reachable(self) -> int:
        """How many verifiers can take a session now."""
        return sum(link.reachable for link in self._verifiers)

    def pick_verifier(self, excluded: Set[str] = frozenset()) -> VerifierLink:
        """The less loaded of two random reachable verifiers. Raises Unavailable."""
        candidates = [v for v in self._verifiers if v.reachable and v.name not in excluded]
        if not candidates:
            raise Unavailable("no verifier is reachable at the moment; try again in a few seconds")
        pair = random.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda link: link.inflight)

    def pick_drafter(self, avoid: DrafterLink | None = None) -> DrafterLink | None:
        """The drafter with the fewest sessions; `avoid` only where it is the only one."""
        return min(self._drafters, key=lambda link: (link is avoid, link.attached), default=None)

    async def worker_metrics(self) -> dict[str, str]:
        """The metrics of every worker that answers in time, by its name."""
        workers: list[Worker] = [link.worker for link in self._verifiers]
        workers += [link.worker for link in self._drafters]
        texts = await asyncio.gather(*(_metrics_of(worker) for worker in workers))
        pairs = zip(workers, texts, strict=True)
        return {worker.name: text for worker, text in pairs if text is not None}

    async def _keep(self, link: VerifierLink) -> None:
        """Connects one verifier again and again, until cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await link.connect()
            except (CoppiceError, TimeoutError, grpc.aio.AioRpcError) as error:
                logger.info("verifier away", extra={"verifier": link.name, "error": str(error)})
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            self._publish_readiness()
            await link.until_lost()
            logger.warning("verifier lost", extra={"verifier": link.name})
            self._publish_readiness()

    def _publish_readiness(self) -> None:
        now, before = (self.ready, self.away) if self.reachable else (self.away, self.ready)
        before.clear()
        now.set()


async def _metrics_of(worker: Worker) -> str | None:
    try:
        return await asyncio.wait_for(worker.metrics(), METRICS_DEADLINE_SECONDS)
    except (CoppiceError, TimeoutError):
        return None
