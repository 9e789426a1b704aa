"""One verifier as the drafter sees it: a long-lived stream, kept while sessions are attached."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from coppice.errors import FailedPrecondition, Unavailable
from coppice.tree import DraftTree
from drafter_svc import wire
from drafter_svc.drafter import DraftTimes, FeatureRows
from drafter_svc.session import Update
from protos import verifier_pb2 as pb
from protos.verifier_pb2_grpc import VerifierStub

logger = logging.getLogger(__name__)

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One message answers a whole batch, features included.
    ("grpc.max_receive_message_length", 64 << 20),
)
STREAM_ERRORS = (TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError)
REFUSING_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)

Stream = grpc.aio.StreamStreamCall[pb.DraftMessage, pb.VerifierMessage]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds."""

    connect: float = 5.0  # until the Welcome
    reconnect: float = 30.0  # attempts in all, before the sessions are given up
    write: float = 10.0
    features: float = 10.0
    refused: float = 60.0  # how long a misfit is believed to last


class SessionListener(Protocol):
    """Who is told what happens to attached sessions. Calls return at once."""

    def committed(self, session_id: str, update: Update) -> None: ...

    def paused(self, session_id: str, epoch: int) -> None: ...

    def ended(self, session_id: str, epoch: int, forget: bool) -> None:
        """The attachment is over; `forget` false: the session may well come back."""
        ...


class VerifierClient:
    """Joins sessions at one verifier and carries their messages.

    A task owns the stream. It ends when the stream breaks: then the sessions are dropped, for
    their gateways attach them anew, here or elsewhere. The next `join` starts another.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        listener: SessionListener,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.address = address
        self._hello = hello
        self._listener = listener
        self._deadlines = deadlines or Deadlines()
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = VerifierStub(self._channel)
        self._epochs: dict[str, int] = {}
        self._outgoing: deque[pb.DraftItem] = deque()
        self._to_send = asyncio.Event()
        self._connected = False
        self._owner: asyncio.Task[None] | None = None
        self._refusal: FailedPrecondition | None = None
        self._refused_until = 0.0

    @property
    def idle(self) -> bool:
        """Without a stream, without sessions, and without a refusal to remember."""
        return (
            not self._epochs
            and (self._owner is None or self._owner.done())
            and self._current_refusal() is None
        )

    def join(self, session_id: str, epoch: int) -> None:
        """Joins, at once or when the stream stands. Raises FailedPrecondition while the verifier
        is known to misfit."""
        if (refusal := self._current_refusal()) is not None:
            raise FailedPrecondition(str(refusal))
        self._epochs[session_id] = epoch
        if self._connected:
            self._send(wire.join(session_id, epoch))
        elif self._owner is None or self._owner.done():
            self._owner = asyncio.create_task(self._own_stream(), name=f"draft {self.address}")

    def leave(self, session_id: str, epoch: int) -> None:
        if self._epochs.get(session_id) == epoch:
            del self._epochs[session_id]
            self._send(wire.leave(session_id, epoch))

    def send_tree(
        self, session_id: str, epoch: int, base_length: int, draft_id: int, tree: DraftTree
    ) -> None:
        self._send(wire.tree(session_id, epoch, base_length, draft_id, tree))

    def send_pass(self, session_id: str, epoch: int, base_length: int) -> None:
        self._send(wire.nothing(session_id, epoch, base_length))

    def send_latency(self, times: DraftTimes) -> None:
        self._send(wire.latency(times))

    async def pull(self, session_id: str, epoch: int, positions: range) -> FeatureRows:
        """Features of committed `positions`. Raises Unavailable when they can't be had whole."""
        request = pb.FeatureRequest(
            session_id=session_id, epoch=epoch, start=positions.start, end=positions.stop
        )
        data = bytearray()
        dtype, at = "", positions.start
        try:
            async for chunk in self._stub.Features(request, timeout=self._deadlines.features):
                if chunk.start != at:
                    raise Unavailable(f"features of position {at} expected, got {chunk.start}")
                data += chunk.data
                dtype, at = chunk.dtype, at + chunk.rows
            rows = wire.feature_rows(bytes(data), dtype, wire.feature_width(self._hello))
        except (grpc.aio.AioRpcError, ValueError) as error:
            raise Unavailable(f"features {positions} from {self.address}: {_said(error)}") from None
        if len(rows) != len(positions):
            raise Unavailable(f"features {positions} from {self.address}: {len(rows)} rows came")
        return FeatureRows(positions.start, rows)

    async def close(self) -> None:
        """Ends the stream and its task."""
        self._epochs.clear()
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.gather(self._owner, return_exceptions=True)
        await self._channel.close()

    def _current_refusal(self) -> FailedPrecondition | None:
        now = asyncio.get_running_loop().time()
        return self._refusal if now < self._refused_until else None

    def _send(self, item: pb.DraftItem) -> None:
        if self._connected:
            self._outgoing.append(item)
            self._to_send.set()

    async def _own_stream(self) -> None:
        try:
            stream = await self._connect_retrying()
            try:
                await self._exchange(stream)
            finally:
                stream.cancel()
        except FailedPrecondition as error:
            logger.error("verifier %s: %s", self.address, error)
            self._refusal = error
            self._refused_until = asyncio.get_running_loop().time() + self._deadlines.refused
        except Unavailable as error:
            logger.warning("verifier %s: %s", self.address, error)
        finally:
            self._connected = False
            for session_id, epoch in self._epochs.items():
                self._listener.ended(session_id, epoch, forget=False)
            self._epochs.clear()

    async def _connect_retrying(self) -> Stream:
        late = stop_after_delay(self._deadlines.reconnect)

        def given_up(state: RetryCallState) -> bool:
            return not self._epochs or late(state)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=given_up,
            reraise=True,
        )
        return await retrying(self._connect)

    async def _connect(self) -> Stream:
        """A stream that has been welcomed, with all sessions joined. Raises Unavailable, or
        FailedPrecondition for a misfit."""
        stream = self._stub.Draft()
        try:
            async with asyncio.timeout(self._deadlines.connect):
                await stream.write(pb.DraftMessage(items=[pb.DraftItem(hello=self._hello)]))
                first = await stream.read()
            items = list(first.items) if isinstance(first, pb.VerifierMessage) else []
            if not items or items[0].WhichOneof("item") != "welcome":
                raise Unavailable("the stream ended before the Welcome")
            wire.check_welcome(self._hello, items[0].welcome)
        except BaseException as error:
            stream.cancel()
            if isinstance(error, STREAM_ERRORS):
                raise _as_coppice_error(error) from None
            raise
        self._outgoing.clear()
        self._connected = True
        for session_id, epoch in self._epochs.items():
            self._send(wire.join(session_id, epoch))
        self._take(items[1:])
        return stream

    async def _exchange(self, stream: Stream) -> None:
        """Both directions until either ends."""
        directions = [
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._write(stream)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            results = await asyncio.gather(*directions, return_exceptions=True)
        broken = [result for result in results if isinstance(result, Exception)]
        reason = _said(broken[0]) if broken else "closed by the verifier"
        raise Unavailable(f"the stream ended: {reason}")

    async def _read(self, stream: Stream) -> None:
        """Without a deadline: a verifier may be silent for long, and keepalive ends a dead one."""
        while isinstance(message := await stream.read(), pb.VerifierMessage):
            self._take(message.items)

    async def _write(self, stream: Stream) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            items = list(self._outgoing)
            self._outgoing.clear()
            async with asyncio.timeout(self._deadlines.write):
                await stream.write(pb.DraftMessage(items=items))

    def _take(self, items: Iterable[pb.VerifierItem]) -> None:
        for item in items:
            kind = item.WhichOneof("item")
            if kind == "committed":
                committed = item.committed
                update = wire.update(committed, wire.feature_width(self._hello))
                self._listener.committed(committed.session_id, update)
            elif kind == "paused":
                self._listener.paused(item.paused.session_id, item.paused.epoch)
            elif kind == "closed":
                self._closed(item.closed.session_id, item.closed.epoch)
            elif kind == "refused":
                refused = item.refused
                logger.warning("session %s: draft refused: %s", refused.session_id, refused.reason)

    def _closed(self, session_id: str, epoch: int) -> None:
        if self._epochs.get(session_id) == epoch:
            del self._epochs[session_id]
            self._listener.ended(session_id, epoch, forget=True)


def _as_coppice_error(error: Exception) -> FailedPrecondition | Unavailable:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in REFUSING_CODES:
        return FailedPrecondition(_said(error))
    return Unavailable(_said(error))


def _said(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
