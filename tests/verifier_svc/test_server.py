"""The verifier's door over real gRPC, with a tiny random target behind it."""

import asyncio

import grpc
import pytest
import torch

from protos import common_pb2, verifier_pb2

PROMPT = [3, 4, 5, 6, 7, 8, 9]
SECONDS = 20.0


async def answer(call) -> tuple[list[int], verifier_pb2.RunEvent]:
    """All tokens from here on, and the last event."""
    tokens: list[int] = []
    last = verifier_pb2.RunEvent()
    while (event := await call.read()) is not grpc.aio.EOF:
        tokens += event.tokens
        last = event
    return tokens, last


async def test_a_session_streams_registered_first_and_its_statistics_last(served) -> None:
    call = served.run()
    first = await call.read()
    assert (list(first.tokens), first.drafter) == ([], verifier_pb2.DRAFTER_STATE_NONE)
    tokens, last = await answer(call)
    assert len(tokens) == 24
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.stats.plain_steps == 23


async def test_a_stop_string_across_tokens_ends_the_answer(served) -> None:
    tokens, _ = await answer(served.run())
    stop = f"w{tokens[4]} w{tokens[5]}"
    text = "".join(f"w{token} " for token in tokens)
    stopping = common_pb2.StoppingParams(max_tokens=24, ignore_eos=True, stop=["never", stop])
    stopped, last = await answer(served.run(session_id="b", stopping=stopping))
    shown = "".join(f"w{token} " for token in stopped)
    assert stop in shown
    assert stop not in shown[: -len(f"w{stopped[-1]} ")]
    assert text.startswith(shown)
    assert (last.finish_reason, last.stop_reason) == (common_pb2.FINISH_REASON_STOP, stop)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": []}, "prompt = 0"),
        ({"prompt": [1] * 200}, "prompt = 200: must be of 1 to 199 tokens"),
        ({"prompt": [48]}, r"prompt\[0\] = 48"),
        ({"committed": [99]}, r"committed\[0\] = 99"),
        ({"committed": [1] * 24}, "committed = 24"),
        ({"session_id": ""}, "session_id"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1.0, seed=1)}, "sampling.temperature"),
        ({"sampling": common_pb2.SamplingParams(top_p=0.0, seed=1)}, "sampling.top_p"),
        ({"sampling": common_pb2.SamplingParams()}, "sampling.seed"),
        ({"stopping": common_pb2.StoppingParams(stop_token_ids=[48])}, "stop_token_ids"),
        ({"stopping": common_pb2.StoppingParams(max_tokens=0)}, "stopping.max_tokens"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    served, fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=complaint) as error:
        await answer(served.run(**fields))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def hello(**fields: object) -> verifier_pb2.DraftMessage:
    item = verifier_pb2.Hello(
        **{
            "protocol_version": 1, "drafter_id": "d", "head": "h",
            "features": verifier_pb2.FEATURE_KIND_FINAL, "hidden_size": 32, "vocab_size": 48,
            **fields,
        }
    )  # fmt: skip
    return verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(hello=item)])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hidden_size": 64}, "hidden size: drafter d with head h has 64, verifier of tiny has 32"),
        ({"vocab_size": 50}, "vocabulary: .* has 50, .* has 48"),
        ({"target_hash": "other"}, "target: .* has other, .* has hash"),
        ({"protocol_version": 2}, "protocol version: .* has 2, .* has 1"),
        ({"features": 9}, "features: .* reads those of kind 9, .* keeps the final one"),
        (
            {"features": verifier_pb2.FEATURE_KIND_EAGLE3, "feature_layers": [0, 1, 2]},
            r"head h reads the inputs of layers \[0, 1, 2\], verifier of tiny keeps the final one",
        ),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_with_both_sides_named(
    served, fields: dict[str, object], complaint: str
) -> None:
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello(**fields))
    with pytest.raises(grpc.aio.AioRpcError, match=complaint) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("served", [(0, 1, 2)], indirect=True)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "the final one"),
        ({"features": verifier_pb2.FEATURE_KIND_EAGLE3, "feature_layers": [0, 2, 1]}, "2, 1"),
        ({"features": verifier_pb2.FEATURE_KIND_EAGLE3}, r"layers \[\]"),
    ],
)
async def test_a_drafter_that_reads_other_features_is_refused_with_both_named(
    served, fields: dict[str, object], wanted: str
) -> None:
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello(**fields))
    with pytest.raises(grpc.aio.AioRpcError, match=f"{wanted}.*layers \\[0, 1, 2\\]") as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("served", [(2, 0, 1)], indirect=True)
async def test_features_of_three_layers_are_pulled_side_by_side(served) -> None:
    run = served.run(stopping=common_pb2.StoppingParams(max_tokens=150, ignore_eos=True))
    await run.read()
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello(features=verifier_pb2.FEATURE_KIND_EAGLE3, feature_layers=[2, 0, 1]))
    assert (await call.read()).items[0].welcome.model.model == "tiny"
    join = verifier_pb2.Join(session_id="a", epoch=2)
    await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(join=join)]))
    assert (await call.read()).items[0].WhichOneof("item") == "committed"
    request = verifier_pb2.FeatureRequest(session_id="a", epoch=2, start=0, end=7)
    chunks = [chunk async for chunk in served.stub.Features(request, timeout=SECONDS)]
    data = b"".join(chunk.data for chunk in chunks)
    rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(7, 3 * 32)
    embedding = served.bench.engine.runner.model.weights.embedding
    assert torch.equal(rows[:, 32:64], embedding[PROMPT])  # the input of layer 0
    call.cancel()
    run.cancel()


async def test_a_stream_that_does_not_begin_with_hello_is_refused(served) -> None:
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(verifier_pb2.DraftMessage())
    with pytest.raises(grpc.aio.AioRpcError, match="a Hello"):
        await call.read()


async def test_a_drafter_joins_drafts_pulls_features_and_leaves(served) -> None:
    wanted, _ = await answer(served.run(session_id="plain"))
    run = served.run(stopping=common_pb2.StoppingParams(max_tokens=150, ignore_eos=True))
    await run.read()
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello())
    welcome = (await call.read()).items[0].welcome
    assert welcome.model.model == "tiny"
    join = verifier_pb2.Join(session_id="a", epoch=2)
    await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(join=join)]))
    committed = (await call.read()).items[0].committed
    assert committed.start == 0
    assert list(committed.tokens)[:7] == PROMPT
    request = verifier_pb2.FeatureRequest(session_id="a", epoch=2, start=0, end=7)
    chunks = [chunk async for chunk in served.stub.Features(request, timeout=SECONDS)]
    assert sum(chunk.rows for chunk in chunks) == 7
    assert sum(len(chunk.data) for chunk in chunks) == 7 * 32 * 4
    request.end = 190
    with pytest.raises(grpc.aio.AioRpcError, match="not computed") as error:
        [chunk async for chunk in served.stub.Features(request, timeout=SECONDS)]
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    call.cancel()
    tokens, last = await answer(run)
    assert tokens[:24] == wanted
    assert last.drafter == verifier_pb2.DRAFTER_STATE_LOST


async def test_a_flood_of_trees_stops_no_session(served) -> None:
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello())
    await call.read()
    tree = verifier_pb2.DraftItem(tree=verifier_pb2.Tree(session_id="a", tokens=[1] * 300))
    flood = verifier_pb2.DraftMessage(items=[tree] * 5000)

    async def write_for_ever() -> None:
        while True:
            await call.write(flood)

    flooding = asyncio.create_task(write_for_ever())
    await asyncio.sleep(0)  # the flood begins first
    stopping = common_pb2.StoppingParams(max_tokens=100, ignore_eos=True)
    tokens, _ = await answer(served.run(stopping=stopping))
    assert len(tokens) == 100
    assert len(served.bench.engine._inbox) < 10
    flooding.cancel()
    call.cancel()


async def test_a_drafter_that_reads_nothing_is_cut_off(served) -> None:
    run = served.run(stopping=common_pb2.StoppingParams(max_tokens=190, ignore_eos=True))
    await run.read()
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello())
    join = verifier_pb2.Join(session_id="a", epoch=2)
    await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(join=join)]))
    engine = served.bench.engine
    while not (session := engine.sessions.get("a")) or session.draft.link is None:
        await run.read()
    link = session.draft.link
    big = verifier_pb2.Committed(features=bytes(1 << 16))

    def bury() -> None:
        for _ in range(6000):
            link.send(verifier_pb2.VerifierItem(committed=big))

    engine.post(bury)
    _, last = await answer(run)
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert link._items.qsize() <= 4096
    call.cancel()


async def test_joining_an_unknown_session_is_answered_with_closed(served) -> None:
    call = served.stub.Draft(timeout=SECONDS)
    await call.write(hello())
    await call.read()
    join = verifier_pb2.Join(session_id="nobody", epoch=2)
    await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(join=join)]))
    closed = (await call.read()).items[0].closed
    assert (closed.session_id, closed.reason) == ("nobody", "unknown session")
    call.cancel()


async def test_a_client_that_leaves_frees_its_slots(served) -> None:
    run = served.run(stopping=common_pb2.StoppingParams(max_tokens=150, ignore_eos=True))
    await run.read()
    await run.read()
    run.cancel()
    # The next session's passes come after the cancel.
    await answer(served.run(session_id="b"))
    assert "a" not in served.bench.engine.sessions


async def test_draining_lets_sessions_finish_and_takes_no_new_ones(served) -> None:
    run = served.run()
    await run.read()
    drain = served.stub.Drain(verifier_pb2.DrainRequest(grace_seconds=15), timeout=SECONDS)
    tokens, _ = await answer(run)
    assert len(tokens) == 24
    assert (await drain).unfinished == 0
    assert served.drained.is_set()
    with pytest.raises(grpc.aio.AioRpcError, match="draining") as error:
        await answer(served.run(session_id="b"))
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
