"""A stream outlives its verifier: another one goes on with what the client has already."""

import asyncio

import grpc
import httpx
import pytest

from gateway.sessions import log_key, session_key
from protos import common_pb2, inference_pb2, verifier_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
JOINED = verifier_pb2.DRAFTER_STATE_JOINED
REQUEST = inference_pb2.GenerateRequest(text="hi", speculation=False)


async def begins(house, text="one ", request=REQUEST, **fields):
    """A stream after its first piece, the verifier that runs it, and the other one."""
    for verifier in house.verifiers:
        verifier.registers()
        verifier.commits(text, **fields)
    call = house.stub.Generate(request)
    piece = await call.read()
    assert piece.text == text
    running = next(verifier for verifier in house.verifiers if verifier.requests)
    other = next((v for v in house.verifiers if v is not running), None)
    if other is not None:  # it was prepared to be the first
        while not other.script.empty():
            other.script.get_nowait()
    return call, piece, running, other


async def rest_of(call):
    pieces = []
    while (piece := await asyncio.wait_for(call.read(), 10.0)) is not grpc.aio.EOF:
        pieces.append(piece)
    return pieces


async def recoveries(house, cause):
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{house.server.http_port}/metrics")
    name = f'coppice_session_recoveries_total{{cause="{cause}"}} '
    return next(float(line[len(name) :]) for line in page.text.splitlines() if name in line)


async def test_another_verifier_goes_on_where_the_lost_one_was(build, redis):
    house = await build(verifiers=2)
    call, piece, lost, other = await begins(house)
    other.answers("two")
    await lost.die()
    pieces = [piece, *await rest_of(call)]
    assert "".join(each.text for each in pieces) == "one two"
    assert bytes(token for each in pieces for token in each.token_ids) == b"one two"
    first, second = lost.requests[0], other.requests[0]
    assert bytes(second.committed) == b"one "
    assert second.epoch > first.epoch
    for field in ("session_id", "prompt", "sampling", "stopping", "speculation"):
        assert getattr(second, field) == getattr(first, field)
    assert second.sampling.HasField("seed")
    assert pieces[-1].usage.completion_tokens == 7
    assert len({each.request_id for each in pieces}) == 1
    assert not any(each.numerics_changed for each in pieces)
    assert await recoveries(house, "lost") == 1
    log = await redis.lrange(log_key(piece.request_id), 0, -1)
    assert bytes(int(token) for token in log) == b"one two"
    record = await redis.hgetall(session_key(piece.request_id))
    assert record[b"verifier"] == other.name.encode()
    assert int(record[b"epoch"]) == second.epoch


async def test_the_restarted_verifier_goes_on_where_it_was(house):
    call, piece, verifier, _ = await begins(house)
    await verifier.die()
    await asyncio.wait_for(house.router.away.wait(), 5.0)
    verifier.answers("two")
    await verifier.start()
    pieces = [piece, *await rest_of(call)]
    assert "".join(each.text for each in pieces) == "one two"
    assert bytes(verifier.requests[1].committed) == b"one "


async def test_log_probs_and_stop_strings_reach_over_the_break(build):
    house = await build(verifiers=2)
    request = inference_pb2.GenerateRequest(
        text="hi", speculation=False, stopping=common_pb2.StoppingParams(stop=["END"])
    )

    def logprobs(text):
        return [
            common_pb2.TokenLogprobs(chosen=common_pb2.TokenProb(token_id=ord(letter), logprob=-1))
            for letter in text
        ]

    for verifier in house.verifiers:
        verifier.registers()
        verifier.commits("ab E", logprobs=logprobs("ab E"))
    call = house.stub.Generate(request)
    first = await call.read()
    running = next(verifier for verifier in house.verifiers if verifier.requests)
    other = next(verifier for verifier in house.verifiers if verifier is not running)
    while not other.script.empty():
        other.script.get_nowait()
    other.registers()
    other.commits(
        "ND",
        logprobs=logprobs("ND"),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        stop_reason="END",
    )
    await running.die()
    pieces = [first, *await rest_of(call)]
    assert "".join(piece.text for piece in pieces) == "ab "
    ids = [entry.chosen.token_id for piece in pieces for entry in piece.logprobs]
    assert bytes(ids) == b"ab END"
    assert pieces[-1].stop_reason == "END"


async def test_statistics_are_those_of_all_parts(build):
    house = await build(verifiers=2)
    parts = [
        common_pb2.SpeculationStats(
            speculative_steps=3, accepted_nodes=4, accepted_per_position=[3, 1], missed_drafts=2
        ),
        common_pb2.SpeculationStats(
            speculative_steps=5, plain_steps=7, accepted_nodes=9, accepted_per_position=[5, 3, 1]
        ),
    ]
    call, _, lost, other = await begins(house, stats=parts[0])
    other.registers()
    other.commits("x", stats=common_pb2.SpeculationStats(plain_steps=1))  # so far, not in all
    other.commits("y", finish_reason=LENGTH, stats=parts[1])
    await lost.die()
    assert (await rest_of(call))[-1].speculation == common_pb2.SpeculationStats(
        speculative_steps=8,
        plain_steps=7,
        accepted_nodes=13,
        accepted_per_position=[8, 4, 1],
        missed_drafts=2,
    )


async def test_a_session_goes_to_a_verifier_of_equal_bits_where_there_is_one(build):
    house = await build(numerics=["bits-1", "bits-2", "bits-1"])
    first, unequal, equal = house.verifiers
    first.registers()
    first.commits("one ")
    for link in house.router.verifiers[1:]:
        link.draining = True  # so that the session begins at the first
    call = house.stub.Generate(REQUEST)
    await call.read()
    house.router.verifiers[1].draining = False
    house.router.verifiers[2].load.own += 100
    house.router.verifiers[2].draining = False
    unequal.answers("wrong")
    equal.answers("two")
    await first.die()
    pieces = await rest_of(call)
    assert len(equal.requests) == 1
    assert not any(piece.numerics_changed for piece in pieces)


async def test_a_continuation_with_other_bits_is_flagged(build):
    house = await build(numerics=["bits-1", "bits-2"])
    call, piece, lost, other = await begins(house)
    other.answers("two")
    await lost.die()
    pieces = await rest_of(call)
    assert not piece.numerics_changed
    assert [each.numerics_changed for each in pieces] == [True] * len(pieces)


async def test_an_answer_that_had_no_token_yet_is_not_flagged(build):
    house = await build(numerics=["bits-1", "bits-2"])
    for verifier in house.verifiers:
        verifier.registers()
    call = house.stub.Generate(REQUEST)
    reading = asyncio.create_task(rest_of(call))
    waits = [asyncio.create_task(verifier.called.wait()) for verifier in house.verifiers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
    running = next(verifier for verifier in house.verifiers if verifier.requests)
    other = next(verifier for verifier in house.verifiers if verifier is not running)
    other.commits("whole", finish_reason=LENGTH)
    await running.die()
    (piece,) = await reading
    assert piece.text == "whole"
    assert not piece.numerics_changed
    for wait in waits:
        wait.cancel()


async def test_what_is_the_requests_own_fault_is_not_tried_elsewhere(build):
    house = await build(verifiers=2)
    call, _, running, other = await begins(house)
    running.breaks(grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not other.requests


async def test_a_request_that_brings_down_every_verifier_is_given_up(house):
    call, _, verifier, _ = await begins(house)
    for _ in range(10):
        verifier.breaks(grpc.StatusCode.INTERNAL)
        verifier.registers()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(verifier.requests) == 4


async def test_a_stream_that_makes_progress_recovers_any_number_of_times(house):
    call, piece, verifier, _ = await begins(house)
    for number in range(6):
        verifier.breaks(grpc.StatusCode.UNAVAILABLE)
        verifier.registers()
        verifier.commits(str(number))
    verifier.finishes(LENGTH)
    pieces = [piece, *await rest_of(call)]
    assert "".join(each.text for each in pieces) == "one 012345"
    assert [bytes(request.committed) for request in verifier.requests[1:]] == [
        b"one 012345"[:length] for length in range(4, 10)
    ]


async def test_a_full_verifier_is_waited_for(house):
    call, _, verifier, _ = await begins(house)
    verifier.breaks(grpc.StatusCode.UNAVAILABLE)
    verifier.breaks(grpc.StatusCode.RESOURCE_EXHAUSTED)
    verifier.answers("two")
    assert "".join(piece.text for piece in await rest_of(call)) == "two"


async def test_without_any_verifier_the_wait_is_bounded(build):
    house = await build(recovery_seconds=0.3)
    call, _, verifier, _ = await begins(house)
    await verifier.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_clients_deadline_holds_while_a_verifier_is_waited_for(house):
    house.verifier.registers()
    house.verifier.commits("one ")
    call = house.stub.Generate(REQUEST, timeout=1.0)
    await call.read()
    await house.verifier.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_may_leave_while_a_verifier_is_waited_for(house, redis):
    call, piece, verifier, _ = await begins(house)
    await verifier.die()
    await asyncio.wait_for(house.router.away.wait(), 5.0)
    call.cancel()
    async with asyncio.timeout(5.0):
        while await redis.exists(session_key(piece.request_id)):
            pass


async def test_the_drafter_follows_its_session_with_a_higher_epoch(build):
    house = await build(verifiers=2, drafters=2)
    request = inference_pb2.GenerateRequest(text="hi")
    call, _, lost, other = await begins(house, request=request, drafter=JOINED)
    first = await asyncio.wait_for(house.attaches.get(), 5.0)
    busy = next(link for link in house.router.drafters if link.worker.name == first.drafter)
    busy.load.own += 5  # it has the session's draft KV all the same
    other.answers("two")
    await lost.die()
    second = await asyncio.wait_for(house.attaches.get(), 5.0)
    assert second.drafter == first.drafter
    assert second.verifier_address == other.address
    assert second.epoch > other.requests[0].epoch > first.epoch
    await rest_of(call)
    assert [link.load.own for link in house.router.drafters if link is not busy] == [0]


async def test_every_verifier_and_drafter_is_free_of_the_session_at_its_end(build):
    house = await build(verifiers=2)
    call, _, lost, other = await begins(house, request=inference_pb2.GenerateRequest(text="hi"))
    other.answers("two")
    await lost.die()
    await rest_of(call)
    links = [*house.router.verifiers, *house.router.drafters]
    async with asyncio.timeout(5.0):
        while any(link.load.own for link in links):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
