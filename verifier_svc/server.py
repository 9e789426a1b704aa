"""The verifier's gRPC door: messages in and out of the engine's thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from coppice.errors import CoppiceError, FailedPrecondition, InvalidArgument, Unavailable
from coppice.models.decoder import Decoder
from coppice.models.placement import dtype_name
from coppice.request import SamplingParams, StoppingParams, check_tokens, parse_params
from coppice.stopping import FinishReason, Stopper
from coppice.tokenizer import Tokenizer
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.engine import Engine
from verifier_svc.session import Logprobs, Session, StepEvent, new_session

PROTOCOL_VERSION = 1
FEATURE_CHUNK_BYTES = 256 * 1024
# A message to a drafter holds at most so much, so that trees are not delayed behind features.
_MESSAGE_BYTES = 1024 * 1024
# A drafter that leaves so many items unread is cut off.
_MAX_UNREAD = 4096
# Items of one drafter that the engine takes between two passes.
_ITEMS_AT_ONCE = 256
_HELLO_SECONDS = 10.0
_WRITE_SECONDS = 10.0
_ENGINE_SECONDS = 60.0

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class StreamLink:
    """One drafter's stream, as the engine's thread sees it."""

    def __init__(self, hello: verifier_pb2.Hello, loop: asyncio.AbstractEventLoop) -> None:
        self.name = hello.drafter_id
        self.wants_features = hello.features != verifier_pb2.FEATURE_KIND_NONE
        self._loop = loop
        self._overflown = False
        self._items: asyncio.Queue[verifier_pb2.VerifierItem | None] = asyncio.Queue()

    def send(self, item: verifier_pb2.VerifierItem) -> None:
        self._loop.call_soon_threadsafe(self.put, item)

    def put(self, item: verifier_pb2.VerifierItem | None) -> None:
        """On the loop's thread; None ends the stream."""
        if self._items.qsize() < _MAX_UNREAD:
            self._items.put_nowait(item)
        else:
            self._overflown = True

    async def messages(self) -> AsyncIterator[verifier_pb2.VerifierMessage]:
        """All that is queued, a message at a time, until the end."""
        while True:
            item = await self._items.get()
            message = verifier_pb2.VerifierMessage()
            while item is not None:
                message.items.append(item)
                if self._items.empty() or message.ByteSize() >= _MESSAGE_BYTES:
                    break
                item = self._items.get_nowait()
            yield message
            if item is None or self._overflown:
                return


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
        self._on_drain = on_drain

    async def Run(  # noqa: N802
        self, request: verifier_pb2.RunRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.RunEvent]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[StepEvent] = asyncio.Queue()

        def sink(event: StepEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            session = self._session(request, sink)
        except CoppiceError as error:
            await context.abort(error.grpc_status, str(error))
        self._engine.post(lambda: self._engine.open(session))
        try:
            while True:
                event = await self._next(events)
                if event.error is not None:
                    await context.abort(event.error.grpc_status, str(event.error))
                yield run_event(event)
                if event.finish is not None:
                    return
        finally:
            self._engine.post(lambda: self._engine.cancel(session))

    async def Draft(  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request_iterator: AsyncIterator[verifier_pb2.DraftMessage],
        context: Context,
    ) -> None:
        messages = aiter(request_iterator)
        try:
            first = await _within(_HELLO_SECONDS, anext(messages), "no Hello")
            link = StreamLink(self._checked_hello(first), asyncio.get_running_loop())
        except (CoppiceError, StopAsyncIteration) as error:
            status = getattr(error, "grpc_status", grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(status, str(error) or "no Hello")
        welcome = verifier_pb2.Welcome(protocol_version=PROTOCOL_VERSION, model=self._info)
        link.put(verifier_pb2.VerifierItem(welcome=welcome))
        reader = asyncio.create_task(self._read_drafts(first, messages, link))
        try:
            async for message in link.messages():
                await _within(_WRITE_SECONDS, context.write(message), "the drafter did not read")
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
                data = await self._on_engine(lambda part=part: self._engine.read_features(part))
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
        await self._on_engine(self._engine.drain)
        while self._engine.sessions and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # the engine's thread has no asyncio event to set

        def close_rest() -> int:
            rest = list(self._engine.sessions.values())
            for session in rest:
                self._engine.close(session, Unavailable("the verifier was drained; try again"))
            return len(rest)

        return await self._on_engine(close_rest)

    # ---- helpers -----------------------------------------------------------

    async def _on_engine(self, work: Callable[[], T]) -> T:
        """The result of `work` run on the engine's thread, or what it raised. Raises Unavailable
        when the engine is stuck."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(finish, None, error)
            else:
                loop.call_soon_threadsafe(finish, result, None)

        self._engine.post(run)
        return await _within(_ENGINE_SECONDS, future, "the engine does not respond")

    async def _next(self, events: "asyncio.Queue[StepEvent]") -> StepEvent:
        """The session's next event. A session may queue for long, but never at a dead engine."""
        while True:
            try:
                return await asyncio.wait_for(events.get(), _ENGINE_SECONDS)
            except TimeoutError:
                try:
                    await self._on_engine(lambda: None)
                except Unavailable as error:
                    return StepEvent(error=error)

    def _session(
        self, request: verifier_pb2.RunRequest, sink: Callable[[StepEvent], None]
    ) -> Session:
        sampling = parse_params(SamplingParams, "sampling", _fields(request.sampling))
        stopping = parse_params(StoppingParams, "stopping", _fields(request.stopping))
        prompt, committed = list(request.prompt), list(request.committed)
        vocab, limit = self._info.vocab_size, self._info.max_context
        if not request.session_id:
            raise InvalidArgument("session_id", "", "not empty")
        if not 1 <= len(prompt) < limit:
            raise InvalidArgument("prompt", len(prompt), f"of 1 to {limit - 1} tokens")
        for name, ids in (
            ("prompt", prompt),
            ("committed", committed),
            ("stop_token_ids", list(stopping.stop_token_ids)),
            ("logit_bias", list(sampling.logit_bias)),
        ):
            check_tokens(name, ids, vocab)
        if sampling.seed is None:
            raise InvalidArgument("sampling.seed", None, "set by the gateway")
        left = limit - len(prompt)
        max_tokens = min(stopping.max_tokens or left, left)
        if len(committed) >= max_tokens:
            raise InvalidArgument("committed", len(committed), f"of fewer than {max_tokens} tokens")
        stopper = Stopper(stopping, self._model.config.eos_token_ids, max_tokens, self._tokenizer)
        return new_session(
            request.session_id,
            request.epoch,
            prompt,
            sampling,
            stopping.min_tokens,
            stopper,
            sink,
            request.speculation,
            committed,
        )

    def _checked_hello(self, message: verifier_pb2.DraftMessage) -> verifier_pb2.Hello:
        """The Hello of a stream's first message. Raises FailedPrecondition for a misfit."""
        if not message.items or message.items[0].WhichOneof("item") != "hello":
            raise InvalidArgument("items[0]", "", "a Hello")
        hello = message.items[0].hello
        config = self._model.config
        for name, theirs, ours in (
            ("protocol version", hello.protocol_version, PROTOCOL_VERSION),
            ("hidden size", hello.hidden_size or config.hidden_size, config.hidden_size),
            ("vocabulary", hello.vocab_size or config.vocab_size, config.vocab_size),
            ("target", hello.target_hash or self._info.target_hash, self._info.target_hash),
        ):
            if theirs != ours:
                raise FailedPrecondition(
                    f"{name}: drafter {hello.drafter_id} with head {hello.head} has {theirs}, "
                    f"verifier of {self._info.model} has {ours}"
                )
        if hello.features != verifier_pb2.FEATURE_KIND_NONE:
            self._check_features(hello)
        return hello

    def _check_features(self, hello: verifier_pb2.Hello) -> None:
        layers = self._engine.runner.feature_layers
        own = verifier_pb2.FEATURE_KIND_EAGLE3 if layers else verifier_pb2.FEATURE_KIND_FINAL
        wanted = _features_shown(hello.features, hello.feature_layers)
        kept = _features_shown(own, layers)
        if wanted != kept:
            raise FailedPrecondition(
                f"features: drafter {hello.drafter_id} with head {hello.head} reads {wanted}, "
                f"verifier of {self._info.model} keeps {kept}; give both the same speculation.head"
            )

    async def _read_drafts(
        self,
        first: verifier_pb2.DraftMessage,
        messages: AsyncIterator[verifier_pb2.DraftMessage],
        link: StreamLink,
    ) -> None:
        """Feeds the engine until the drafter closes its side or the stream breaks."""
        try:
            await self._take(first, link)
            async for message in messages:
                await self._take(message, link)
        finally:
            link.put(None)

    async def _take(self, message: verifier_pb2.DraftMessage, link: StreamLink) -> None:
        """Hands over a few items at a time and waits until the engine has them: a drafter that
        floods is slowed down by its own stream, and holds up no pass for long."""
        for start in range(0, len(message.items), _ITEMS_AT_ONCE):
            part = message.items[start : start + _ITEMS_AT_ONCE]
            await self._on_engine(lambda part=part: self._dispatch(part, link))

    def _dispatch(self, items: Sequence[verifier_pb2.DraftItem], link: StreamLink) -> None:
        """On the engine's thread."""
        for item in items:
            match item.WhichOneof("item"):
                case "join":
                    self._engine.join(link, item.join)
                case "tree":
                    self._engine.receive_tree(link, item.tree)
                case "pass":
                    self._engine.receive_pass(link, getattr(item, "pass"))
                case "leave":
                    self._engine.leave(link, item.leave)
                case "latency":
                    self._engine.budget.observe_levels(item.latency.seconds_per_depth)
                case _:
                    pass


async def _within(seconds: float, work: Awaitable[T], complaint: str) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Unavailable(f"{complaint} within {seconds:g} s") from None


def _features_shown(kind: int, layers: Sequence[int]) -> str:
    """Equal for equal features."""
    if kind == verifier_pb2.FEATURE_KIND_EAGLE3:
        return f"the inputs of layers {list(layers)}"
    return "the final one" if kind == verifier_pb2.FEATURE_KIND_FINAL else f"those of kind {kind}"


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


_FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def run_event(event: StepEvent) -> verifier_pb2.RunEvent:
    """The wire form of a step's event."""
    return verifier_pb2.RunEvent(
        tokens=event.tokens,
        logprobs=[_logprobs(entry) for entry in event.logprobs],
        mode=event.mode,
        tree_nodes=event.nodes,
        accepted_length=event.accepted,
        drafter=event.drafter,
        finish_reason=_FINISH[event.finish.reason if event.finish else None],
        stop_reason=event.finish.by if event.finish else "",
        stats=event.stats,
    )


def _logprobs(entry: Logprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenProb(token_id=entry.token, logprob=entry.logprob),
        top=[common_pb2.TokenProb(token_id=token, logprob=lp) for token, lp in entry.top],
    )
