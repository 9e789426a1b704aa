"""The verifier's gRPC door: messages in and out of the engine's thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from coppice.errors import CoppiceError, InvalidArgument, Unavailable
from coppice.grammar import GrammarCompiler
from coppice.models.decoder import Decoder
from coppice.models.placement import dtype_name
from coppice.tokenizer import Tokenizer
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.draft_stream import PROTOCOL_VERSION, StreamLink, checked_hello, read_drafts
from verifier_svc.engine import Engine
from verifier_svc.engine_calls import next_event, on_engine, within
from verifier_svc.run_messages import requested_session, run_event
from verifier_svc.session import Session, StepEvent

FEATURE_CHUNK_BYTES = 256 * 1024
_HELLO_SECONDS = 10.0
_WRITE_SECONDS = 10.0
_GRAMMAR_SECONDS = 30.0  # the gateway refuses what takes more than a few
# A gateway's client may stop to read for a while; for longer no session is held.
_UNTAKEN_SECONDS = 300.0

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """Validates, hands over to the engine, and frees on every way out."""

    def __init__(
        self,
        engine: Engine,
        model: Decoder,
        tokenizer: Tokenizer,
        info: common_pb2.ModelInfo,
        on_drain: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_drain` is awaited before sessions are turned away."""
        self._engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._info = info
        self._grammars = GrammarCompiler(
            tokenizer.to_json, info.vocab_size, tuple(info.eos_token_ids)
        )
        self._on_drain = on_drain

    async def Run(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: verifier_pb2.RunRequest, context: Context
    ) -> None:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[StepEvent] = asyncio.Queue()

        def sink(event: StepEvent) -> None:
            session.untaken += len(event.tokens)
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            session = await self._requested_session(request, sink)
        except CoppiceError as error:
            await context.abort(error.grpc_status, str(error))
        failure: CoppiceError | None = None
        self._engine.post(lambda: self._engine.open(session))
        try:
            await self._write_events(session, events, context)
        except CoppiceError as error:
            failure = error
        finally:
            self._engine.post(lambda: self._engine.cancel(session))
        if failure is not None:  # waits for the gateway, hence after all else
            await context.abort(failure.grpc_status, str(failure))

    async def _requested_session(
        self, request: verifier_pb2.RunRequest, sink: Callable[[StepEvent], None]
    ) -> Session:
        def make() -> Session:
            config, info = self._model.config, self._info
            return requested_session(request, config, info, self._tokenizer, self._grammars, sink)

        if not request.sampling.HasField("structured_output"):
            return make()
        complaint = "the grammar was not compiled"
        return await within(_GRAMMAR_SECONDS, asyncio.to_thread(make), complaint)

    async def _write_events(
        self, session: Session, events: "asyncio.Queue[StepEvent]", context: Context
    ) -> None:
        """All events until the session's end. gRPC takes a message when the gateway's window has
        room for it, so the engine hears how many tokens the gateway has taken; in lumps, or that
        would be as many messages as there are events. Raises what ended the session."""
        lump = max(1, self._engine.settings.verifier.max_untaken // 4)
        taken = 0
        while True:
            event = await next_event(self._engine, events)
            await within(
                _UNTAKEN_SECONDS, context.write(run_event(event)), "the gateway did not read"
            )
            if event.finish is not None:
                return
            taken += len(event.tokens)
            if taken >= lump:
                self._engine.post(lambda tokens=taken: self._engine.taken(session, tokens))
                taken = 0

    async def Draft(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request_iterator: AsyncIterator[verifier_pb2.DraftMessage],
        context: Context,
    ) -> None:
        messages = aiter(request_iterator)
        try:
            first = await within(_HELLO_SECONDS, anext(messages), "no Hello")
            layers = self._engine.runner.feature_layers
            hello = checked_hello(first, self._model.config, self._info, layers)
        except (CoppiceError, StopAsyncIteration) as error:
            status = getattr(error, "grpc_status", grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(status, str(error) or "no Hello")
        link = StreamLink(hello, asyncio.get_running_loop())
        welcome = verifier_pb2.Welcome(protocol_version=PROTOCOL_VERSION, model=self._info)
        link.put(verifier_pb2.VerifierItem(welcome=welcome))
        reader = asyncio.create_task(read_drafts(first, messages, link, self._engine))
        try:
            async for message in link.messages():
                await within(_WRITE_SECONDS, context.write(message), "the drafter did not read")
        except Unavailable as error:
            unread = error
        else:
            unread = None
        finally:
            reader.cancel()
            self._engine.post(lambda: self._engine.lose(link))
        if unread is not None:  # waits for the drafter, hence after all else
            await context.abort(unread.grpc_status, str(unread))

    async def Features(  # noqa: N802
        self, request: verifier_pb2.FeatureRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.FeatureChunk]:
        features = self._engine.runner.features
        rows = max(1, FEATURE_CHUNK_BYTES // (features.shape[1] * features.itemsize))
        dtype = dtype_name(self._model.dtype)
        start = request.start
        while start < request.end:
            part = verifier_pb2.FeatureRequest(
                session_id=request.session_id,
                epoch=request.epoch,
                start=start,
                end=min(request.end, start + rows),
            )
            try:
                data = await on_engine(
                    self._engine, lambda part=part: self._engine.read_features(part)
                )
            except CoppiceError as error:
                await context.abort(error.grpc_status, str(error))
            yield verifier_pb2.FeatureChunk(
                start=start, rows=part.end - start, data=data, dtype=dtype
            )
            start = part.end

    async def GetModelInfo(  # noqa: N802
        self, request: verifier_pb2.GetVerifierInfoRequest, context: Context
    ) -> common_pb2.ModelInfo:
        return self._info

    async def Drain(  # noqa: N802
        self, request: verifier_pb2.DrainRequest, context: Context
    ) -> verifier_pb2.DrainResponse:
        if not 0.0 <= request.grace_seconds <= 3600.0:
            error = InvalidArgument("grace_seconds", request.grace_seconds, "in [0, 3600]")
            await context.abort(error.grpc_status, str(error))
        return verifier_pb2.DrainResponse(unfinished=await self.drain(request.grace_seconds))

    async def drain(self, grace_seconds: float) -> int:
        """Takes no more sessions, waits for the running ones, closes the rest; returns how many."""
        await self._on_drain()
        until = time.monotonic() + grace_seconds
        await on_engine(self._engine, self._engine.drain)
        while self._engine.sessions and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # the engine's thread has no asyncio event to set

        def close_rest() -> int:
            rest = list(self._engine.sessions.values())
            for session in rest:
                self._engine.close(session, Unavailable("the verifier was drained; try again"))
            return len(rest)

        return await on_engine(self._engine, close_rest)
