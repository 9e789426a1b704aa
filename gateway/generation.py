"""One request's life: opened at a verifier, streamed to its client, and cleaned up after."""

import json
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
from gateway.metrics import GatewayMetrics
from gateway.router import Router, VerifierLink
from gateway.sessions import SessionLog, SessionRecord, SessionStore
from gateway.validation import Order
from protos import common_pb2, inference_pb2, verifier_pb2

RunCall = grpc.aio.UnaryStreamCall[verifier_pb2.RunRequest, verifier_pb2.RunEvent]


@dataclass(frozen=True, slots=True)
class Services:
    """What every request needs of the gateway."""

    model: common_pb2.ModelInfo
    tokenizer: Tokenizer
    router: Router
    sessions: SessionStore
    metrics: GatewayMetrics


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
        self._attachment: Attachment | None = None

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
            self._release()
            await self._log.close(finished)

    async def _open(self) -> verifier_pb2.RunEvent:
        """Registers the session at a verifier; where one is away or full, at another."""
        tried: set[str] = set()
        failure: CoppiceError | None = None
        while True:
            try:
                verifier = self._services.router.pick_verifier(tried)
            except Unavailable as none_left:
                raise failure or none_left from None
            tried.add(verifier.name)
            self._epoch += 1
            await self._register(verifier)
            try:
                return await self._run(verifier)
            except (Unavailable, ResourceExhausted) as error:
                failure = error
                self._release()

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
            sampling=order.sampling,
            stopping=order.stopping,
            speculation=order.speculation,
        )
        timeout = None if self._deadline is None else self._deadline - time.monotonic()
        self._verifier = verifier
        verifier.inflight += 1
        self._call = verifier.stub.Run(request, timeout=timeout)
        event = await self._next()
        if order.speculation:
            self._attachment = Attachment(
                self._services.router, self._id, verifier.address, self._epoch
            )
        return event

    async def _next(self) -> verifier_pb2.RunEvent:
        assert self._call is not None and self._verifier is not None
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _failure(self._verifier.name, error) from error
        if not isinstance(event, verifier_pb2.RunEvent):
            raise Unavailable(
                f"verifier {self._verifier.name} closed the session before its end; try again"
            )
        return event

    def _watch_drafter(self, state: verifier_pb2.DrafterState.ValueType) -> None:
        if self._attachment is not None:
            self._attachment.observe(state)

    def _release(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._verifier is not None:
            self._verifier.inflight -= 1
            self._verifier = None


def _failure(verifier: str, error: grpc.aio.AioRpcError) -> CoppiceError:
    """What a broken `Run` means to the client. Whatever is not the request's own fault can be
    tried again, since a dying process ends its streams with any status."""
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
            return FailedPrecondition(f"verifier {verifier} does not fit its gateway: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the request's deadline passed before the answer ended")
        case _:
            return Unavailable(f"verifier {verifier} was lost ({details}); try again")
