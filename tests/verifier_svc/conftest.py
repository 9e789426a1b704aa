"""A tiny random target inside a real engine, driven a pass at a time, or served over gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import tokenizers
import torch
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from coppice.grammar import Grammar
from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import Decoder, DecoderWeights, LayerWeights, RotaryTable
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.stopping import Stopper
from coppice.tokenizer import Tokenizer
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner
from verifier_svc.server import VerifierServicer
from verifier_svc.session import Session, StepEvent, new_session

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM = 48, 32, 2, 4, 2, 8


def tiny_decoder(seed: int = 0) -> Decoder:
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make) * shape[-1] ** -0.5

    config = DecoderConfig(
        "llama", VOCAB, HIDDEN, 48, LAYERS, HEADS, KV_HEADS, DIM, 1e-5, RopeConfig(), 256,
        eos_token_ids=(1,),
    )  # fmt: skip
    layers = tuple(
        LayerWeights(
            torch.ones(HIDDEN),
            random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            None,
            None,
            None,
            random(HIDDEN, HEADS * DIM),
            None,
            torch.ones(HIDDEN),
            random(96, HIDDEN),
            None,
            random(HIDDEN, 48),
            None,
        )
        for _ in range(LAYERS)
    )
    embedding = torch.randn((VOCAB, HIDDEN), generator=make)
    lm_head = 3.0 * random(VOCAB, HIDDEN)
    rotary = RotaryTable(10000.0 ** (-torch.arange(0, DIM, 2) / DIM), 1.0)
    return Decoder(config, DecoderWeights(embedding, layers, torch.ones(HIDDEN), lm_head), rotary)


@dataclass
class Bench:
    """An engine and what its sessions have said."""

    engine: Engine
    events: dict[str, list[StepEvent]] = field(default_factory=dict)

    def open(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        stopping: StoppingParams | None = None,
        epoch: int = 1,
        committed: tuple[int, ...] = (),
        speculation: bool = True,
        grammar: Grammar | None = None,
    ) -> Session:
        sampling = sampling or SamplingParams(temperature=0.0)
        stopping = stopping or StoppingParams(max_tokens=24, ignore_eos=True)
        stopper = Stopper(stopping, (1,), stopping.max_tokens or 24, None, grammar)
        events = self.events.setdefault(name, [])

        def sink(event: StepEvent) -> None:
            session.untaken += len(event.tokens)
            events.append(event)

        session = new_session(
            name, epoch, prompt, sampling, stopping.min_tokens, stopper,
            sink, speculation, committed,
        )  # fmt: skip
        self.engine.post(lambda: self.engine.open(session))
        return session

    def take(self, name: str) -> None:
        """The session's gateway takes all that there is for it."""
        session = self.engine.sessions.get(name)
        if session is not None:
            self.engine.taken(session, session.untaken)

    def run(self, passes: int = 10_000) -> None:
        """Runs passes until all sessions are over, with gateways that read."""
        self.engine.step(block=False)
        while self.engine.sessions and passes:
            for name in self.events:
                self.take(name)
            self.engine.step(block=False)
            self.engine.check_integrity()
            passes -= 1
        assert not self.engine.sessions, "sessions were left over"
        assert self.engine.slots.used == 0

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.tokens]


@dataclass(eq=False)
class Link:
    """A drafter's stream whose answers a test decides; they arrive before the next pass."""

    engine: Engine
    answer: Callable[[verifier_pb2.Committed], verifier_pb2.Tree | verifier_pb2.Pass | None]
    name: str = "test"
    wants_features: bool = True
    items: list[verifier_pb2.VerifierItem] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)  # items of each
    known: dict[str, list[int]] = field(default_factory=dict)

    def send(self, *items: verifier_pb2.VerifierItem) -> None:
        self.sends.append(len(items))
        for item in items:
            self._take(item)

    def _take(self, item: verifier_pb2.VerifierItem) -> None:
        self.items.append(item)
        if item.WhichOneof("item") != "committed":
            return
        message = item.committed
        known = self.known.setdefault(message.session_id, [])
        assert len(known) >= message.start
        known[message.start :] = message.tokens
        assert len(known) == message.base_length
        reply = self.answer(message)
        if isinstance(reply, verifier_pb2.Tree):
            self.engine.post(lambda: self.engine.receive_tree(self, reply))
        elif reply is not None:
            self.engine.post(lambda: self.engine.receive_pass(self, reply))

    def join(self, session: str, epoch: int = 2) -> None:
        join = verifier_pb2.Join(session_id=session, epoch=epoch)
        self.engine.post(lambda: self.engine.join(self, join))

    def sent(self, kind: str) -> list[verifier_pb2.VerifierItem]:
        return [item for item in self.items if item.WhichOneof("item") == kind]


def make_bench(feature_layers: tuple[int, ...] = (), **groups: dict[str, object]) -> Bench:
    settings = Settings.model_validate({"speculation": {"budget": "fixed"}, **groups})
    runner = Runner(tiny_decoder(), settings.verifier.kv_slots or 16384, feature_layers)
    return Bench(Engine(runner, settings, VerifierMetrics("test")))


@pytest.fixture
def new_bench() -> Callable[..., Bench]:
    return make_bench


@pytest.fixture
def new_link() -> type[Link]:
    return Link


@pytest.fixture
def target() -> Decoder:
    return tiny_decoder()


@dataclass
class Served:
    stub: "verifier_pb2_grpc.VerifierAsyncStub"
    bench: Bench
    drained: asyncio.Event

    def run(self, **fields: object):
        """A session of 24 tokens, unless `fields` say otherwise."""
        request = {
            "session_id": "a",
            "epoch": 1,
            "prompt": [3, 4, 5, 6, 7, 8, 9],
            "speculation": True,
            "sampling": common_pb2.SamplingParams(temperature=0.0, seed=1),
            "stopping": common_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
            **fields,
        }
        return self.stub.Run(verifier_pb2.RunRequest(**request), timeout=20.0)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Served]]:
    """Serves a bench to one client with the given channel options."""

    @asynccontextmanager
    async def serving(
        bench: Bench, options: Sequence[tuple[str, int]] = ()
    ) -> AsyncIterator[Served]:
        # Token i reads "wi ": single letters would make stop strings match everywhere.
        words = tokenizers.Tokenizer(WordLevel({f"w{i} ": i for i in range(48)}, unk_token="w0 "))
        words.decoder = Fuse()
        words.save(str(tmp_path / "tokenizer.json"))
        info = common_pb2.ModelInfo(
            model="tiny", target_hash="hash", vocab_size=48, hidden_size=32, max_context=200
        )
        drained = asyncio.Event()

        async def on_drain() -> None:
            drained.set()

        engine, tokenizer = bench.engine, Tokenizer.load(tmp_path)
        servicer = VerifierServicer(engine, engine.runner.model, tokenizer, info, on_drain)
        server = grpc.aio.server()
        verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        thread = threading.Thread(target=engine.run)
        thread.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield Served(verifier_pb2_grpc.VerifierStub(channel), bench, drained)
        engine.stop()
        await asyncio.to_thread(thread.join)
        await server.stop(0)
        engine.check_integrity()
        assert engine.slots.used == 0

    return serving


@pytest.fixture
async def served(serve: Callable[..., AbstractAsyncContextManager[Served]], request):
    """Keeps the final feature, or those of the layers that a test names."""
    async with serve(make_bench(getattr(request, "param", ()))) as served:
        yield served
