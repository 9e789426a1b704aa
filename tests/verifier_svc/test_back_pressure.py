"""A gateway that does not read: its session is paused, holds nothing, and loses nothing."""

import asyncio

import grpc
import pytest

from coppice.request import SamplingParams, StoppingParams
from protos import common_pb2, verifier_pb2

PROMPT = [3, 4, 5, 6, 7, 8, 9]
SAMPLED = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2)
LONG = StoppingParams(max_tokens=60, ignore_eos=True)


def alone(new_bench, prompt: list[int] = PROMPT) -> list[int]:
    bench = new_bench()
    bench.open("a", prompt, SAMPLED, LONG)
    bench.run()
    return bench.tokens("a")


def chain(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
    return verifier_pb2.Tree(
        session_id=message.session_id, epoch=message.epoch, base_length=message.base_length,
        draft_id=message.base_length, tokens=[1, 2], parents=[0, 1], scores=[-1.0, -2.0],
    )  # fmt: skip


def series(bench, name: str, state: str) -> float:
    labels = {"worker": "test", "state": state}
    return bench.engine.metrics.registry.get_sample_value(f"coppice_{name}", labels)


def test_an_unread_session_pauses_and_goes_on_where_it_was(new_bench, new_link) -> None:
    answer = alone(new_bench)
    bench = new_bench(verifier={"max_untaken": 10})
    session = bench.open("a", PROMPT, SAMPLED, LONG)
    link = new_link(bench.engine, chain)
    link.join("a")
    while bench.engine.step(block=False):
        bench.engine.check_integrity()
    assert 10 < len(bench.tokens("a")) <= 10 + 3
    assert (len(session.slots), bench.engine.slots.used) == (0, 0)
    assert [link.items[-1].WhichOneof("item")] == ["paused"]
    assert [series(bench, "sessions", s) for s in ("running", "waiting", "paused")] == [0, 0, 1]
    bench.engine.taken(session, 4)
    assert not bench.engine.step(block=False), "more than half of the limit is still unread"
    bench.take("a")
    bench.engine.step(block=False)
    # Nobody has needed the slots, so the root alone was computed.
    assert bench.engine.metrics.prefix_cache_hits._value.get() == len(session.tokens) - 2
    bench.run()
    assert bench.tokens("a") == answer


def test_what_others_needed_meanwhile_is_computed_again(new_bench) -> None:
    answer = alone(new_bench)
    bench = new_bench(verifier={"max_untaken": 30, "kv_slots": 140})
    bench.open("a", PROMPT, SAMPLED, LONG)
    while bench.engine.step(block=False):
        pass
    cached = bench.engine.slots.cached
    others = {f"b{index}": [index + 10] * 50 for index in range(3)}
    for name, prompt in others.items():
        bench.open(name, prompt, SAMPLED, StoppingParams(max_tokens=20, ignore_eos=True))
    while not all(bench.events[name] and bench.events[name][-1].finish for name in others):
        assert bench.engine.step(block=False), "a paused session holds up others"
        bench.engine.check_integrity()
    bench.run()
    assert bench.engine.metrics.prefix_cache_hits._value.get() < cached
    assert bench.tokens("a") == answer


def test_paused_sessions_do_not_count_as_load(new_bench) -> None:
    bench = new_bench(verifier={"max_untaken": 4}, guard={"enter": 1, "exit": 1})
    for name in ("a", "b", "c"):
        bench.open(name, PROMPT, SAMPLED, LONG)
    while bench.engine.step(block=False):
        pass
    assert series(bench, "sessions", "paused") == 3
    assert bench.engine.metrics.queue_depth._value.get() == 0
    bench.engine.guard.update(0, 1e18)
    assert not bench.engine.guard.closed
    bench.run()


# With gRPC's own windows a peer takes in megabytes that nobody reads.
TIGHT = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 128))


@pytest.mark.parametrize("read_on", [True, False])
async def test_a_reader_that_stops_holds_its_session_and_nobody_else(
    new_bench, serve, read_on: bool
) -> None:
    long = common_pb2.StoppingParams(max_tokens=180, ignore_eos=True)
    bench = new_bench(verifier={"max_untaken": 16})
    async with serve(bench, TIGHT) as served:
        stuck = served.run(stopping=long)
        assert list((await stuck.read()).tokens) == []
        engine = bench.engine
        # Its reader takes nothing from here on. Other sessions come and go, until it is paused.
        wanted: list[int] = []
        index = 0
        while not ((session := engine.sessions.get("a")) and session.paused):
            wanted = await tokens_of(served.run(session_id=f"b{index}", stopping=long))
            index += 1
        assert len(wanted) == 180
        unread = len(session.tokens) - len(PROMPT)
        assert 16 < unread < 16 + 128, "more than the limit and a window"
        await tokens_of(served.run(session_id="c"))
        assert len(session.tokens) - len(PROMPT) == unread
        if read_on:
            assert await tokens_of(stuck) == wanted
        else:
            stuck.cancel()
            await tokens_of(served.run(session_id="d"))
        while engine.sessions:  # noqa: ASYNC110 - the engine's thread has no event to set
            await asyncio.sleep(0)


async def test_a_reader_that_never_comes_back_is_cut_off(
    new_bench, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier_svc.server._UNTAKEN_SECONDS", 0.1)
    async with serve(new_bench(verifier={"max_untaken": 16}), TIGHT) as served:
        stuck = served.run(stopping=common_pb2.StoppingParams(max_tokens=180, ignore_eos=True))
        await stuck.read()
        while served.bench.engine.sessions:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="the gateway did not read") as error:
            await tokens_of(stuck)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def tokens_of(call) -> list[int]:
    tokens: list[int] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        tokens += event.tokens
    return tokens
