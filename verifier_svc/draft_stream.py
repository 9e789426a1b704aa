"""One drafter's `Draft` stream: who may open it, and its messages in and out of the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from coppice.errors import FailedPrecondition, InvalidArgument
from coppice.models.config import DecoderConfig
from protos import common_pb2, verifier_pb2
from verifier_svc.engine import Engine
from verifier_svc.engine_calls import on_engine

PROTOCOL_VERSION = 1
# A message to a drafter holds at most so much, so that trees are not delayed behind features.
_MESSAGE_BYTES = 1024 * 1024
# A drafter that leaves so many items unread is cut off.
_MAX_UNREAD = 4096
# Items of one drafter that the engine takes between two passes.
_ITEMS_AT_ONCE = 256


class StreamLink:
    """One drafter's stream, as the engine's thread sees it."""

    def __init__(self, hello: verifier_pb2.Hello, loop: asyncio.AbstractEventLoop) -> None:
        self.name = hello.drafter_id
        self.wants_features = hello.features != verifier_pb2.FEATURE_KIND_NONE
        self._loop = loop
        self._overflown = False
        self._items: asyncio.Queue[verifier_pb2.VerifierItem | None] = asyncio.Queue()

    def send(self, *items: verifier_pb2.VerifierItem) -> None:
        self._loop.call_soon_threadsafe(self.put, *items)

    def put(self, *items: verifier_pb2.VerifierItem | None) -> None:
        """On the loop's thread; None ends the stream."""
        for item in items:
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


def checked_hello(
    message: verifier_pb2.DraftMessage,
    config: DecoderConfig,
    info: common_pb2.ModelInfo,
    feature_layers: Sequence[int],
) -> verifier_pb2.Hello:
    """The Hello of a stream's first message. Raises FailedPrecondition for a misfit."""
    if not message.items or message.items[0].WhichOneof("item") != "hello":
        raise InvalidArgument("items[0]", "", "a Hello")
    hello = message.items[0].hello
    for name, theirs, ours in (
        ("protocol version", hello.protocol_version, PROTOCOL_VERSION),
        ("hidden size", hello.hidden_size or config.hidden_size, config.hidden_size),
        ("vocabulary", hello.vocab_size or config.vocab_size, config.vocab_size),
        ("target", hello.target_hash or info.target_hash, info.target_hash),
    ):
        if theirs != ours:
            raise FailedPrecondition(
                f"{name}: drafter {hello.drafter_id} with head {hello.head} has {theirs}, "
                f"verifier of {info.model} has {ours}"
            )
    if hello.features != verifier_pb2.FEATURE_KIND_NONE:
        _check_features(hello, info.model, feature_layers)
    return hello


def _check_features(hello: verifier_pb2.Hello, model: str, layers: Sequence[int]) -> None:
    own = verifier_pb2.FEATURE_KIND_EAGLE3 if layers else verifier_pb2.FEATURE_KIND_FINAL
    wanted = _features_shown(hello.features, hello.feature_layers)
    kept = _features_shown(own, layers)
    if wanted != kept:
        raise FailedPrecondition(
            f"features: drafter {hello.drafter_id} with head {hello.head} reads {wanted}, "
            f"verifier of {model} keeps {kept}; give both the same speculation.head"
        )


def _features_shown(kind: int, layers: Sequence[int]) -> str:
    """Equal for equal features."""
    if kind == verifier_pb2.FEATURE_KIND_EAGLE3:
        return f"the inputs of layers {list(layers)}"
    return "the final one" if kind == verifier_pb2.FEATURE_KIND_FINAL else f"those of kind {kind}"


async def read_drafts(
    first: verifier_pb2.DraftMessage,
    messages: AsyncIterator[verifier_pb2.DraftMessage],
    link: StreamLink,
    engine: Engine,
) -> None:
    """Feeds the engine until the drafter closes its side or the stream breaks."""
    try:
        await _take(first, link, engine)
        async for message in messages:
            await _take(message, link, engine)
    finally:
        link.put(None)


async def _take(message: verifier_pb2.DraftMessage, link: StreamLink, engine: Engine) -> None:
    """Hands over a few items at a time and waits until the engine has them: a drafter that floods
    is slowed down by its own stream, and holds up no pass for long."""
    for start in range(0, len(message.items), _ITEMS_AT_ONCE):
        part = message.items[start : start + _ITEMS_AT_ONCE]
        await on_engine(engine, lambda part=part: _dispatch(part, link, engine))


def _dispatch(items: Sequence[verifier_pb2.DraftItem], link: StreamLink, engine: Engine) -> None:
    """On the engine's thread."""
    for item in items:
        match item.WhichOneof("item"):
            case "join":
                engine.join(link, item.join)
            case "tree":
                engine.receive_tree(link, item.tree)
            case "pass":
                engine.receive_pass(link, getattr(item, "pass"))
            case "leave":
                engine.leave(link, item.leave)
            case "latency":
                engine.budget.observe_levels(item.latency.seconds_per_depth)
            case _:
                pass
