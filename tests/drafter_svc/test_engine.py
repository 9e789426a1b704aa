"""What the engine does while a batch is being drafted."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coppice.errors import Unavailable
from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, DraftTimes, FeatureRows, Features
from drafter_svc.engine import DraftEngine
from drafter_svc.session import Update
from drafter_svc.telemetry import DraftMetrics

SECONDS = 10.0


class GatedDrafter:
    """Drafts one node per session, once the test lets it."""

    identity = "gated"
    features = Features.NONE
    hidden_size = 0
    vocab_size = 0
    times = DraftTimes()

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.forgotten: list[str] = []
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.batches.append([(request.session_id, len(request.tokens)) for request in requests])
        self.started.release()
        assert self.gate.acquire(timeout=SECONDS)
        return [DraftTree((7,), (0,), (-1.0,)) for _ in requests]

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        return len(tokens) - 1

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


@dataclass
class Recorder:
    """A verifier's side that keeps what is sent to it."""

    trees: "asyncio.Queue[tuple[str, int, int]]" = field(default_factory=asyncio.Queue)
    left: list[tuple[str, int]] = field(default_factory=list)

    def join(self, session_id: str, epoch: int) -> None: ...

    def leave(self, session_id: str, epoch: int) -> None:
        self.left.append((session_id, epoch))

    def send_tree(
        self, session_id: str, epoch: int, base_length: int, draft_id: int, tree: DraftTree
    ) -> None:
        self.trees.put_nowait((session_id, epoch, base_length))

    def send_pass(self, session_id: str, epoch: int, base_length: int) -> None:
        raise AssertionError("there is always something to propose")

    def send_latency(self, times: DraftTimes) -> None: ...

    async def pull(self, session_id: str, epoch: int, positions: range) -> FeatureRows:
        raise Unavailable("no features are needed")

    async def tree(self) -> tuple[str, int, int]:
        return await asyncio.wait_for(self.trees.get(), SECONDS)

    def __hash__(self) -> int:
        return id(self)


@asynccontextmanager
async def engine_of(drafter: GatedDrafter) -> AsyncGenerator[DraftEngine, None]:
    engine = DraftEngine(drafter, DraftMetrics())
    engine.start()
    try:
        yield engine
    finally:
        drafter.gate.release(100)
        await engine.close()


async def drafting(drafter: GatedDrafter) -> None:
    """Until the drafter has begun its next batch; the loop stays free meanwhile."""
    assert await asyncio.to_thread(drafter.started.acquire, timeout=SECONDS)


def update(start: int, end: int, epoch: int = 1) -> Update:
    return Update(epoch, start, end, list(range(start, end)), budget=3)


async def test_messages_that_come_while_drafting_wait_for_the_next_batch() -> None:
    drafter, verifier = GatedDrafter(), Recorder()
    async with engine_of(drafter) as engine:
        for session in "abc":
            engine.attach(session, 1, verifier)
        engine.committed("a", update(0, 4))
        await drafting(drafter)
        engine.committed("b", update(0, 5))
        engine.committed("c", update(0, 6))
        drafter.gate.release(2)
        assert [await verifier.tree() for _ in "abc"] == [("a", 1, 4), ("b", 1, 5), ("c", 1, 6)]
        assert drafter.batches == [[("a", 4)], [("b", 5), ("c", 6)]]


async def test_a_stale_tree_is_sent_with_the_length_that_it_was_made_for() -> None:
    drafter, verifier = GatedDrafter(), Recorder()
    async with engine_of(drafter) as engine:
        engine.attach("a", 1, verifier)
        engine.committed("a", update(0, 4))
        await drafting(drafter)
        engine.committed("a", update(4, 6))
        drafter.gate.release(2)
        assert [await verifier.tree(), await verifier.tree()] == [("a", 1, 4), ("a", 1, 6)]


async def test_a_tree_for_a_replaced_attachment_is_not_sent() -> None:
    drafter, verifier = GatedDrafter(), Recorder()
    async with engine_of(drafter) as engine:
        engine.attach("a", 1, verifier)
        engine.committed("a", update(0, 4))
        await drafting(drafter)
        engine.attach("a", 2, verifier)
        engine.committed("a", update(0, 9, epoch=2))
        drafter.gate.release(2)
        assert await verifier.tree() == ("a", 2, 9)
        assert verifier.trees.empty()
        assert verifier.left == [("a", 1)]


async def test_the_drafter_forgets_a_session_that_is_over_but_not_one_that_may_come_back() -> None:
    drafter, verifier = GatedDrafter(), Recorder()
    async with engine_of(drafter) as engine:
        for session in "abc":
            engine.attach(session, 1, verifier)
        engine.ended("a", 1, forget=True)
        engine.ended("b", 1, forget=False)
        engine.ended("c", 9, forget=True)
        engine.detach("c")
    assert drafter.forgotten == ["a", "c"]
