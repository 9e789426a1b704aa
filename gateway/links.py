"""The workers as the router sees them: what they are, how loaded, whether they can be reached."""

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from coppice.errors import Unavailable
from protos import common_pb2, verifier_pb2
from protos.verifier_pb2_grpc import VerifierStub

if TYPE_CHECKING:  # only the stub files know it
    from protos.verifier_pb2_grpc import VerifierAsyncStub

READY_DEADLINE_SECONDS = 5.0  # then it is asked again

# A verifier pauses the sessions of a gateway that does not read, and that must show: unless the
# window has a fixed size, gRPC takes in megabytes that nobody reads.
_WINDOW_BYTES = 2048
CHANNEL_OPTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
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


class Load:
    """The sessions of one worker: those of this gateway, counted as they come and go, and those
    of others as of the worker's last heartbeat."""

    def __init__(self) -> None:
        self.own = 0
        self._others = 0

    @property
    def total(self) -> int:
        return self.own + self._others

    def report(self, sessions: int) -> None:
        """What the worker itself says."""
        self._others = max(0, sessions - self.own)


class VerifierLink:
    """One verifier: its channel, its identity and its load."""

    def __init__(self, worker: VerifierWorker) -> None:
        self.worker = worker
        self.load = Load()
        self.address = ""
        self.reachable = False
        self.registered = True  # its heartbeats come, as far as is known
        self.draining = False
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
    """One drafter and its load."""

    def __init__(self, worker: DrafterWorker, target_hash: str = "") -> None:
        """`target_hash`: of the only target that it fits; empty: any, or not known."""
        self.worker = worker
        self.target_hash = target_hash
        self.load = Load()
        self.registered = True  # its heartbeats come, as far as is known

    @property
    def name(self) -> str:
        return self.worker.name

    def fits(self, target_hash: str) -> bool:
        return self.target_hash in ("", target_hash)
