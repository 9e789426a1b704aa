"""One request's life: opened at a verifier, streamed to its client, opened at another one when
that is lost, and cleaned up after."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from coppice.errors import (
    CoppiceError,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from coppice.tokenizer import Tokenizer
from gateway.answer import Answer
from gateway.attachment import Attachment
from gateway.links import VerifierLink
from gateway.metrics import GatewayMetrics
from gateway.router import Router
from gateway.sessions import SessionLog, SessionRecord, SessionStore
from gateway.validation import Order
from protos import common_pb2, inference_pb2, verifier_pb2

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 0.5
# Of verifiers that are lost without one token in between: a request that brings down whoever
# takes it must not bring down all.
MAX_FRUITLESS_RECOVERIES = 3

logger = logging.getLogger(__name__)

RunCall = grpc.aio.UnaryStreamCall[verifier_pb2.RunRequest, verifier_pb2.RunEvent]


@dataclass(frozen=True, slots=True)
class Services:
    """What every request needs of the gateway."""

    model: common_pb2.ModelInfo
    tokenizer: Tokenizer
    router: Router
    sessions: SessionStore
    metrics: GatewayMetrics
    recovery_seconds: float  # how long a running answer waits for a verifier


class Generation:
    """`responses` is the whole life; leaving it in any way frees everything that it held."""

    def __init__(
        self, services: Services, order: Order, arrived: float, deadline: float | None
    ) -> None:
        """`arrived` and `deadline` are times of `time.monotonic`."""
        self._services = services
        self._order = order
        self._deadline = deadline
        self._id = uuid.uuid4().hex
        self._epoch = 0
        self._answer = Answer(
            self._id, order, services.model, services.tokenizer, services.metrics, arrived
        )
        self._log = SessionLog(services.sessions, self._id, services.metrics.redis_errors.inc)
        self._verifier: VerifierLink | None = None
        self._call: RunCall | None = None
        self._attachment = Attachment(services.router, self._id) if order.speculation else None
        self._fingerprint = ""  # of the verifier that computed the last tokens
        self._fruitless = 0

    async def responses(self) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """Raises a CoppiceError when the answer cannot go on."""
        gauge = self._services.metrics.sessions
        state = "waiting"
        gauge.labels(state).inc()
        finished = False
        try:
            event = await self._open()
            while True:
                if not event.finish_reason:
                    self._watch_drafter(event.drafter)
                if event.tokens or event.finish_reason:
                    piece = self._answer.piece(event)
                    await self._log.append(event.tokens)
                    if state == "waiting":
                        gauge.labels(state).dec()
                        state = "streaming"
                        gauge.labels(state).inc()
                    finished = bool(event.finish_reason)
                    yield piece
                if finished:
                    return
                event = await self._next()
        finally:
            gauge.labels(state).dec()
            if self._verifier is not None:  # its prefix tree has all of it
                self._services.router.remember(self._verifier, self._tokens)
            self._release()
            if self._attachment is not None:
                self._attachment.close()
            await self._log.close(finished)

    @property
    def _tokens(self) -> tuple[int, ...]:
        return (*self._order.prompt, *self._answer.tokens)

    async def _open(self) -> verifier_pb2.RunEvent:
        """Registers the session at a verifier; where one is away or full, at another."""
        tried: set[str] = set()
        failure: CoppiceError | None = None
        while True:
            try:
                verifier = self._services.router.pick_verifier(
                    self._tokens, tried, self._fingerprint
                )
            except Unavailable as none_left:
                raise failure or none_left from None
            tried.add(verifier.name)
            self._verifier = verifier
            verifier.load.own += 1  # at once, or all that come together would go to one
            self._epoch += 1
            await self._register(verifier)
            try:
                return await self._run(verifier)
            except (Unavailable, ResourceExhausted) as error:
                failure = error
                self._release()

    async def _recover(self, failure: CoppiceError) -> verifier_pb2.RunEvent:
        """Opens the session anew with what the client has already, once a verifier takes it.

        Raises `failure` when none does in time, or when every one breaks off at once.
        """
        assert self._verifier is not None
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_RECOVERIES:
            raise failure
        cause = "drained" if self._verifier.draining else "lost"
        self._services.metrics.recoveries.labels(cause).inc()
        fields = {"session": self._id, "cause": cause, "error": str(failure)}
        logger.warning("session interrupted", extra=fields)
        self._release()
        self._answer.begin_part()
        if self._attachment is not None:
            self._attachment.stop()
            self._epoch = max(self._epoch, self._attachment.epoch)
        until = time.monotonic() + self._services.recovery_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._open()
            except (Unavailable, ResourceExhausted):
                if time.monotonic() + pause > until:
                    raise failure from None
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise _deadline_passed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _register(self, verifier: VerifierLink) -> None:
        order = self._order
        params = {
            "sampling": MessageToDict(order.sampling, preserving_proto_field_name=True),
            "stopping": MessageToDict(order.stopping, preserving_proto_field_name=True),
            "speculation": order.speculation,
        }
        record = SessionRecord(
            session_id=self._id,
            epoch=self._epoch,
            seed=order.sampling.seed,
            model=self._services.model.model,
            verifier=verifier.name,
            numerics_fingerprint=verifier.info.numerics_fingerprint,
            params=json.dumps(params),
            prompt=order.prompt,
        )
        await self._log.register(record)

    async def _run(self, verifier: VerifierLink) -> verifier_pb2.RunEvent:
        """Starts the call; returns its first event, which says that the session is registered."""
        order = self._order
        request = verifier_pb2.RunRequest(
            session_id=self._id,
            epoch=self._epoch,
            prompt=order.prompt,
            committed=self._answer.tokens,
            sampling=order.sampling,
            stopping=order.stopping,
            speculation=order.speculation,
        )
        timeout = None if self._deadline is None else self._deadline - time.monotonic()
        self._call = verifier.stub.Run(request, timeout=timeout)
        event = await self._read()
        fingerprint = verifier.info.numerics_fingerprint
        if self._answer.started and fingerprint != self._fingerprint:
            self._answer.numerics_changed = True
        self._fingerprint = fingerprint
        self._services.router.remember(verifier, order.prompt)
        if self._attachment is not None:
            self._attachment.open(verifier, self._epoch)
        return event

    async def _next(self) -> verifier_pb2.RunEvent:
        """The verifier's next word, or that of the one that takes its place."""
        try:
            event = await self._read()
        except (Unavailable, ResourceExhausted) as failure:
            return await self._recover(failure)
        if event.tokens:
            self._fruitless = 0
        return event

    async def _read(self) -> verifier_pb2.RunEvent:
        assert self._call is not None and self._verifier is not None
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _failure(self._verifier.name, error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The router has closed the channel under the call.
            raise Unavailable(f"verifier {self._verifier.name} has left; try again") from None
        if not isinstance(event, verifier_pb2.RunEvent):
            raise Unavailable(
                f"verifier {self._verifier.name} closed the session before its end; try again"
            )
        return event

    def _watch_drafter(self, state: verifier_pb2.DrafterState.ValueType) -> None:
        if self._attachment is not None:
            self._attachment.observe(state)

    def _release(self) -> None:
        """Leaves the verifier."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._verifier is not None:
            self._verifier.load.own -= 1
            self._verifier = None


def _failure(verifier: str, error: grpc.aio.AioRpcError) -> CoppiceError:
    """What a broken `Run` means. Whatever is not the request's own fault can be tried again, since
    a dying process ends its streams with any status."""
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
            return FailedPrecondition(f"verifier {verifier} refused the session: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return _deadline_passed()
        case _:
            return Unavailable(f"verifier {verifier} was lost ({details}); try again")


def _deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed before the answer ended")
