"""A tiny random target inside a real engine, driven a pass at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.decoder import Decoder, DecoderWeights, LayerWeights, RotaryTable
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.stopping import Stopper
from protos import verifier_pb2
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner
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
    ) -> Session:
        sampling = sampling or SamplingParams(temperature=0.0)
        stopping = stopping or StoppingParams(max_tokens=24, ignore_eos=True)
        stopper = Stopper(stopping, (1,), stopping.max_tokens or 24, None)
        events = self.events.setdefault(name, [])
        session = new_session(
            name, epoch, prompt, sampling, stopping.min_tokens, stopper,
            events.append, speculation, committed,
        )  # fmt: skip
        self.engine.post(lambda: self.engine.open(session))
        return session

    def run(self, passes: int = 10_000) -> None:
        """Runs passes until all sessions are over."""
        self.engine.step(block=False)
        while self.engine.sessions and passes:
            self.engine.step(block=False)
            self.engine.check_integrity()
            passes -= 1
        assert not self.engine.sessions, "sessions were left over"
        assert self.engine.slots.used == 0

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.tokens]


@dataclass
class Link:
    """A drafter's stream whose answers a test decides; they arrive before the next pass."""

    engine: Engine
    answer: Callable[[verifier_pb2.Committed], verifier_pb2.Tree | verifier_pb2.Pass | None]
    name: str = "test"
    wants_features: bool = True
    items: list[verifier_pb2.VerifierItem] = field(default_factory=list)
    known: dict[str, list[int]] = field(default_factory=dict)

    def send(self, item: verifier_pb2.VerifierItem) -> None:
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
    runner = Runner(tiny_decoder(), settings.verifier.kv_slots, feature_layers)
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
