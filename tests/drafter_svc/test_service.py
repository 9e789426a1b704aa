"""The drafter's side of the contract, against a scripted verifier over real gRPC."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from coppice.errors import FailedPrecondition
from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, FeatureRows
from drafter_svc.eagle import EagleNetwork
from drafter_svc.growing import GrowingDrafter
from drafter_svc.ngram import NgramDrafter
from drafter_svc.service import DrafterService
from drafter_svc.tree_builder import DynamicPolicy
from drafter_svc.verifier_client import Deadlines
from protos import common_pb2
from protos import verifier_pb2 as pb
from protos.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server

SECONDS = 10.0
QUICK = Deadlines(connect=2.0, reconnect=8.0, write=2.0, features=2.0)
MODEL = common_pb2.ModelInfo(model="tiny", vocab_size=60, hidden_size=32)


class ScriptedVerifier(VerifierServicer):
    """Says what the test tells it to, and keeps what it hears."""

    def __init__(self, features: Tensor, model: common_pb2.ModelInfo = MODEL) -> None:
        self.model = model
        self.features = features  # [positions, hidden], of every session
        self.heard: asyncio.Queue[pb.DraftItem] = asyncio.Queue()
        self.pulled: list[tuple[int, int]] = []
        self.hellos: list[pb.Hello] = []
        self.streams = 0
        self.refusal: str | None = None
        self.chunk_rows = 3
        self._saying: asyncio.Queue[pb.VerifierMessage | None] = asyncio.Queue()

    def say(self, *items: pb.VerifierItem) -> None:
        self._saying.put_nowait(pb.VerifierMessage(items=items))

    def commit(self, *committed: pb.Committed) -> None:
        self.say(*(pb.VerifierItem(committed=one) for one in committed))

    def break_stream(self) -> None:
        self._saying.put_nowait(None)

    async def hear(self, kind: str) -> Any:
        """The next item, latency reports left out."""
        while True:
            item = await asyncio.wait_for(self.heard.get(), SECONDS)
            heard = item.WhichOneof("item")
            if heard == "latency" and kind != "latency":
                continue
            assert heard == kind, item
            return getattr(item, kind)

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftMessage], context: Any
    ) -> AsyncIterator[pb.VerifierMessage]:
        self.streams += 1
        messages = aiter(request_iterator)
        self.hellos.append((await anext(messages)).items[0].hello)
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        welcome = pb.Welcome(protocol_version=1, model=self.model)
        yield pb.VerifierMessage(items=[pb.VerifierItem(welcome=welcome)])
        reader = asyncio.create_task(self._listen(messages))
        try:
            while (message := await self._saying.get()) is not None:
                yield message
        finally:
            reader.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the script ends here")

    async def _listen(self, messages: AsyncIterator[pb.DraftMessage]) -> None:
        async for message in messages:
            for item in message.items:
                self.heard.put_nowait(item)

    async def Features(  # noqa: N802
        self, request: pb.FeatureRequest, context: Any
    ) -> AsyncIterator[pb.FeatureChunk]:
        self.pulled.append((request.start, request.end))
        if request.end > len(self.features):
            await context.abort(grpc.StatusCode.NOT_FOUND, "not committed")
        for start in range(request.start, request.end, self.chunk_rows):
            rows = self.features[start : min(start + self.chunk_rows, request.end)]
            yield pb.FeatureChunk(
                start=start, rows=len(rows), data=rows.numpy().tobytes(), dtype="float32"
            )

    async def Run(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def serving(verifier: ScriptedVerifier, port: int = 0) -> AsyncGenerator[str, None]:
    server = grpc.aio.server()
    add_VerifierServicer_to_server(verifier, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(drafter: Any) -> AsyncGenerator[DrafterService, None]:
    service = DrafterService(drafter, "drafter-7", QUICK)
    service.start()
    try:
        yield service
    finally:
        async with asyncio.timeout(SECONDS):
            await service.stop()


TOKENS = torch.randint(0, 60, (700,), generator=torch.Generator().manual_seed(1)).tolist()
FEATURES = torch.randn(699, 32, generator=torch.Generator().manual_seed(2))


def committed(
    start: int, end: int, epoch: int = 1, features_from: int | None = None, budget: int = 9,
    session: str = "s",
) -> pb.Committed:  # fmt: skip
    rows = b"" if features_from is None else FEATURES[features_from : end - 1].numpy().tobytes()
    return pb.Committed(
        session_id=session,
        epoch=epoch,
        start=start,
        base_length=end,
        tokens=TOKENS[start:end],
        features_from=features_from or 0,
        features=rows,
        feature_dtype="float32",
        node_budget=budget,
    )


def eagle_drafter(make_tiny_head: Callable[..., Any], kv_slots: int) -> GrowingDrafter:
    network = EagleNetwork(make_tiny_head().head)
    return GrowingDrafter(network, kv_slots, DynamicPolicy(4, 4))


@pytest.fixture
def make_drafter(make_tiny_head: Callable[..., Any]) -> Callable[[], GrowingDrafter]:
    return lambda: eagle_drafter(make_tiny_head, 2048)


MakeDrafter = Callable[[], GrowingDrafter]


def assert_drafted_from(
    tree: pb.Tree, length: int, drafter: GrowingDrafter, budget: int = 9
) -> None:
    """The tree is that of a drafter that is given everything at once."""
    whole = DraftRequest("w", TOKENS[:length], budget, FeatureRows(0, FEATURES[: length - 1]))
    [expected] = drafter.propose([whole])
    assert tree.base_length == length
    assert list(tree.tokens) == list(expected.tokens)
    assert list(tree.parents) == list(expected.parents)
    assert list(tree.scores) == pytest.approx(list(expected.scores), abs=1e-4)
    assert DraftTree.checked(tree.tokens, tree.parents, tree.scores, 60)


async def until(condition: Callable[[], bool]) -> None:
    """Polls, since the metrics' text has no event to wait for."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_joining_drafter_pulls_what_it_lacks_and_then_lives_on_what_is_pushed(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        join = await verifier.hear("join")
        assert (join.session_id, join.epoch) == ("s", 1)
        verifier.commit(committed(0, 10))
        assert_drafted_from(await verifier.hear("tree"), 10, make_drafter())
        verifier.commit(committed(10, 13, features_from=9))
        assert_drafted_from(await verifier.hear("tree"), 13, make_drafter())
        verifier.commit(committed(13, 14, features_from=12))
        assert_drafted_from(await verifier.hear("tree"), 14, make_drafter())
        assert verifier.pulled == [(0, 9)]
    [hello] = verifier.hellos
    assert (hello.drafter_id, hello.hidden_size, hello.vocab_size) == ("drafter-7", 32, 60)
    assert hello.features == pb.FEATURE_KIND_FINAL


async def test_an_eagle3_head_says_which_layers_it_reads_and_gets_rows_as_wide(
    make_tiny_eagle3_head: Callable[..., Any],
) -> None:
    wide = torch.randn(20, 96, generator=torch.Generator().manual_seed(3))
    verifier = ScriptedVerifier(wide)
    policy = DynamicPolicy(4, 4)
    network = EagleNetwork(make_tiny_eagle3_head().head)
    async with serving(verifier) as address, running(GrowingDrafter(network, 256, policy)) as own:
        await own.attach("s", address, 1)
        await verifier.hear("join")
        for start, end in ((0, 10), (10, 12)):
            message = committed(start, end)
            if start:
                message.features_from = start - 1
                message.features = wide[start - 1 : end - 1].numpy().tobytes()
            verifier.commit(message)
            heard = await verifier.hear("tree")
            request = DraftRequest("s", TOKENS[:end], 9, FeatureRows(0, wide[: end - 1]))
            [expected] = GrowingDrafter(network, 256, policy).propose([request])
            assert list(heard.tokens) == list(expected.tokens)
        assert verifier.pulled == [(0, 9)]
    [hello] = verifier.hellos
    assert (hello.features, hello.hidden_size) == (pb.FEATURE_KIND_EAGLE3, 32)
    assert list(hello.feature_layers) == [2, 3, 3]


async def test_every_draft_has_an_id_of_its_own_and_its_times_are_reported(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(committed(0, 10))
        first = await verifier.hear("tree")
        latency = await verifier.hear("latency")
        assert 1 <= len(latency.seconds_per_depth) <= 4
        verifier.commit(committed(10, 11, features_from=9))
        assert (await verifier.hear("tree")).draft_id != first.draft_id


async def test_sessions_of_one_message_are_drafted_together(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        for session in "abc":
            await service.attach(session, address, 1)
            await verifier.hear("join")
        # Two tokens, and the feature of the first pushed: nothing has to be pulled.
        verifier.commit(*(committed(0, 2, features_from=0, session=s) for s in "abc"))
        trees = [await verifier.hear("tree") for _ in "abc"]
        assert {tree.session_id for tree in trees} == set("abc")
        assert "coppice_draft_latency_seconds_count 1.0" in service.metrics()
        assert "coppice_draft_sessions 3.0" in service.metrics()
        nodes = sum(len(tree.tokens) for tree in trees)
        assert f"coppice_drafted_nodes_total {float(nodes)}" in service.metrics()


async def test_nobody_waits_for_the_catch_up_of_a_long_session(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        for session in ("long", "short"):
            await service.attach(session, address, 1)
            await verifier.hear("join")
        verifier.commit(
            committed(0, 700, features_from=0, session="long"),
            committed(0, 10, features_from=0, session="short"),
        )
        first, second = await verifier.hear("tree"), await verifier.hear("tree")
        assert (first.session_id, second.session_id) == ("short", "long")
        assert_drafted_from(second, 700, make_drafter())


async def test_when_two_sessions_do_not_fit_one_drafts_and_one_passes(
    make_tiny_head: Callable[..., Any],
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    drafter = eagle_drafter(make_tiny_head, 700)
    async with serving(verifier) as address, running(drafter) as service:
        for session in ("first", "second"):
            await service.attach(session, address, 1)
            await verifier.hear("join")
        verifier.commit(
            committed(0, 600, features_from=0, session="first"),
            committed(0, 600, features_from=0, session="second"),
        )
        passed = await verifier.hear("pass")
        tree = await verifier.hear("tree")
        assert {passed.session_id, tree.session_id} == {"first", "second"}


async def test_a_higher_epoch_replaces_the_attachment_and_a_lower_one_is_ignored(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 5)
        assert (await verifier.hear("join")).epoch == 5
        await service.attach("s", address, 4)
        await service.attach("s", address, 6)
        assert (await verifier.hear("leave")).epoch == 5
        assert (await verifier.hear("join")).epoch == 6
        verifier.commit(committed(0, 12, epoch=5), committed(0, 10, epoch=6))
        tree = await verifier.hear("tree")
        assert (tree.epoch, tree.base_length) == (6, 10)


async def test_a_session_moves_to_another_verifier(make_drafter: MakeDrafter) -> None:
    old, new = ScriptedVerifier(FEATURES), ScriptedVerifier(FEATURES)
    async with serving(old) as here, serving(new) as there, running(make_drafter()) as service:
        await service.attach("s", here, 1)
        await old.hear("join")
        await service.attach("s", there, 2)
        await old.hear("leave")
        await new.hear("join")
        new.commit(committed(0, 10, epoch=2))
        assert_drafted_from(await new.hear("tree"), 10, make_drafter())


async def test_one_drafter_serves_two_verifiers_and_the_end_of_one_is_nothing_to_the_other(
    make_drafter: MakeDrafter,
) -> None:
    one, other = ScriptedVerifier(FEATURES), ScriptedVerifier(FEATURES)
    async with serving(other) as there, running(make_drafter()) as service:
        async with serving(one) as here:
            await service.attach("s", here, 1)
            await service.attach("t", there, 1)
            await one.hear("join")
            await other.hear("join")
            one.commit(committed(0, 10))
            other.commit(committed(0, 12, session="t"))
            assert_drafted_from(await one.hear("tree"), 10, make_drafter())
            assert_drafted_from(await other.hear("tree"), 12, make_drafter())
            assert service.sessions == 2
        await until(lambda: service.sessions == 1)
        other.commit(committed(12, 14, features_from=11, session="t"))
        assert_drafted_from(await other.hear("tree"), 14, make_drafter())
        await service.attach("s", there, 2)  # moved: its draft KV is there still
        join = await other.hear("join")
        assert (join.session_id, join.epoch) == ("s", 2)


async def test_a_gap_makes_the_drafter_join_again(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(committed(0, 4))
        await verifier.hear("tree")
        verifier.commit(committed(5, 8))
        await verifier.hear("join")
        verifier.commit(committed(0, 8))
        assert_drafted_from(await verifier.hear("tree"), 8, make_drafter())


async def test_after_a_plain_stretch_the_drafter_pulls_what_it_missed(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(committed(0, 10))
        await verifier.hear("tree")
        paused = pb.VerifierItem(paused=pb.Paused(session_id="s", epoch=1))
        catch_up = pb.VerifierItem(committed=committed(10, 25))
        verifier.say(paused, catch_up)
        assert_drafted_from(await verifier.hear("tree"), 25, make_drafter())
        assert verifier.pulled == [(0, 9), (9, 24)]


async def test_without_features_the_drafter_passes_and_goes_on_later(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES[:5])
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(committed(0, 10))
        passed = await verifier.hear("pass")
        assert (passed.session_id, passed.epoch, passed.base_length) == ("s", 1, 10)
        verifier.features = FEATURES
        verifier.commit(committed(10, 11))
        assert_drafted_from(await verifier.hear("tree"), 11, make_drafter())


async def test_malformed_features_are_pulled_instead(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        broken = committed(0, 10, features_from=0)
        broken.features = broken.features[:-3]
        verifier.commit(broken)
        assert_drafted_from(await verifier.hear("tree"), 10, make_drafter())
        assert verifier.pulled == [(0, 9)]


async def test_tokens_that_make_the_drafter_fail_cost_that_draft_alone(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        for session in "ab":
            await service.attach(session, address, 1)
            await verifier.hear("join")
        hostile = committed(0, 10, session="a")
        hostile.tokens[4] = 60_000
        verifier.commit(hostile)
        assert (await verifier.hear("pass")).session_id == "a"
        verifier.commit(committed(0, 10, session="b"))
        assert_drafted_from(await verifier.hear("tree"), 10, make_drafter())


async def test_a_closed_session_is_forgotten(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.say(pb.VerifierItem(closed=pb.Closed(session_id="s", epoch=1)))
        await until(lambda: "coppice_draft_sessions 0.0" in service.metrics())
        await service.attach("s", address, 2)
        assert (await verifier.hear("join")).epoch == 2


async def test_a_detached_session_leaves(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        await service.detach("s")
        await service.detach("s")
        assert (await verifier.hear("leave")).epoch == 1


async def test_a_misfitting_target_is_refused_once_with_both_sides_named(
    make_drafter: MakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    other = common_pb2.ModelInfo(model="other", vocab_size=61, hidden_size=32)
    verifier = ScriptedVerifier(FEATURES, other)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await until(lambda: "coppice_draft_sessions 0.0" in service.metrics())
        with pytest.raises(FailedPrecondition, match=r"head head0@.* target other.* 60 against 61"):
            await service.attach("s", address, 2)
    assert verifier.streams == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_a_verifier_that_refuses_is_not_asked_again(make_drafter: MakeDrafter) -> None:
    verifier = ScriptedVerifier(FEATURES)
    verifier.refusal = "hidden size 64 here"
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await until(lambda: "coppice_draft_sessions 0.0" in service.metrics())
        with pytest.raises(FailedPrecondition, match="hidden size 64 here"):
            await service.attach("s", address, 2)
    assert verifier.streams == 1


async def test_a_broken_stream_drops_the_sessions_and_the_next_attachment_reconnects(
    make_drafter: MakeDrafter,
) -> None:
    verifier = ScriptedVerifier(FEATURES)
    async with serving(verifier) as address, running(make_drafter()) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(committed(0, 10))
        await verifier.hear("tree")
        verifier.break_stream()
        await until(lambda: "coppice_draft_sessions 0.0" in service.metrics())
        assert verifier.streams == 1
        await service.attach("s", address, 2)
        await verifier.hear("join")
        verifier.commit(committed(0, 12, epoch=2))
        assert_drafted_from(await verifier.hear("tree"), 12, make_drafter())
        # What the draft KV held of it was still good.
        assert verifier.pulled == [(0, 9), (9, 11)]


async def test_a_verifier_that_starts_late_is_joined_when_it_is_there(
    make_drafter: MakeDrafter,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    verifier = ScriptedVerifier(FEATURES)
    async with running(make_drafter()) as service:
        await service.attach("s", f"127.0.0.1:{port}", 1)
        async with serving(verifier, port):
            assert (await verifier.hear("join")).session_id == "s"


async def test_the_ngram_drafter_needs_no_features() -> None:
    verifier = ScriptedVerifier(FEATURES[:0])
    async with serving(verifier) as address, running(NgramDrafter(1000, 4)) as service:
        await service.attach("s", address, 1)
        await verifier.hear("join")
        verifier.commit(
            pb.Committed(
                session_id="s", epoch=1, base_length=5, tokens=[7, 8, 9, 7, 8], node_budget=2
            )
        )
        tree = await verifier.hear("tree")
        assert (list(tree.tokens), list(tree.parents)) == ([9, 7], [0, 1])
    assert verifier.pulled == []
    assert verifier.hellos[0].features == pb.FEATURE_KIND_NONE


async def test_stopping_ends_every_task(make_drafter: MakeDrafter) -> None:
    before = asyncio.all_tasks()
    async with running(make_drafter()) as service:
        await service.attach("s", "127.0.0.1:9", 1)
    assert asyncio.all_tasks() == before
