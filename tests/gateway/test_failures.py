"""What breaks, breaks quickly, says so, and leaves nothing behind."""

import asyncio

import grpc
import pytest

from coppice.errors import StartError
from gateway.sessions import SessionStore, log_key, session_key
from protos import common_pb2, inference_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
REQUEST = inference_pb2.GenerateRequest(text="hi", speculation=False)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value.code(), caught.value.details()


async def removed(redis, request_id):
    """Returns when Redis holds nothing of the session."""
    while await redis.exists(session_key(request_id), log_key(request_id)):
        pass


async def test_a_cancelled_request_is_cancelled_at_the_verifier_and_forgotten(house, redis):
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    request_id = (await call.read()).request_id
    assert await redis.exists(session_key(request_id))
    call.cancel()
    await asyncio.wait_for(house.verifier.cancelled.wait(), 5.0)
    await asyncio.wait_for(removed(redis, request_id), 5.0)


async def test_a_request_can_be_cancelled_before_its_first_event(house):
    call = house.stub.Generate(REQUEST)
    reading = asyncio.create_task(call.read())
    await asyncio.wait_for(house.verifier.called.wait(), 5.0)
    call.cancel()
    await asyncio.wait_for(house.verifier.cancelled.wait(), 5.0)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_vanished_client_is_cancelled_at_the_verifier(house):
    house.verifier.registers()
    house.verifier.commits("a")
    await house.stub.Generate(REQUEST).read()
    await house.channel.close()
    await asyncio.wait_for(house.verifier.cancelled.wait(), 5.0)


async def test_the_clients_deadline_ends_the_session_at_the_verifier(house):
    house.verifier.registers()
    code, _ = await failure(house.stub.Generate(REQUEST, timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(house.verifier.cancelled.wait(), 5.0)


async def test_the_verifier_is_told_the_clients_deadline(house):
    house.verifier.answers("x")
    assert [piece async for piece in house.stub.Generate(REQUEST, timeout=30.0)]
    assert 20.0 < house.verifier.seconds_left < 35.0  # the wire rounds it up


async def test_without_a_deadline_the_verifier_gets_none(house):
    house.verifier.answers("x")
    assert [piece async for piece in house.stub.Generate(REQUEST)]
    assert house.verifier.seconds_left is None


async def test_a_verifier_that_does_not_come_back_is_a_retryable_status(build, redis):
    house = await build(recovery_seconds=0.2)
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    request_id = (await call.read()).request_id
    await house.verifier.die()
    code, details = await asyncio.wait_for(failure(call), 5.0)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "verifier-0 was lost" in details
    assert "try again" in details
    await asyncio.wait_for(removed(redis, request_id), 5.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_status_of_the_verifier_tells_the_client_whether_to_retry(house, status, expected):
    house.verifier.breaks(status)
    code, details = await failure(house.stub.Generate(REQUEST))
    assert code is expected
    assert "scripted" in details


async def test_a_verifier_that_refuses_a_session_is_passed_over(build):
    house = await build(verifiers=2)
    house.verifiers[0].breaks(grpc.StatusCode.UNAVAILABLE)
    house.verifiers[1].answers("x")
    pieces = [piece async for piece in house.stub.Generate(REQUEST)]
    assert pieces[0].text == "x"


async def test_all_verifiers_full_is_resource_exhausted(build):
    house = await build(verifiers=2)
    for verifier in house.verifiers:
        verifier.breaks(grpc.StatusCode.RESOURCE_EXHAUSTED)
    code, _ = await failure(house.stub.Generate(REQUEST))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [len(verifier.requests) for verifier in house.verifiers] == [1, 1]


async def test_without_a_verifier_a_request_is_refused_at_once(house):
    await house.verifier.die()
    await asyncio.wait_for(house.router.away.wait(), 5.0)
    code, details = await failure(house.stub.Generate(REQUEST))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no verifier is reachable" in details


async def test_more_requests_than_allowed_are_told_to_come_back(build):
    house = await build(max_inflight=1)
    house.verifier.registers()
    house.verifier.commits("a")
    running = house.stub.Generate(REQUEST)
    await running.read()
    code, details = await failure(house.stub.Generate(REQUEST))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "try again in 1 s" in details
    house.verifier.finishes(LENGTH)
    assert (await running.read()).finish_reason == LENGTH


async def test_a_place_is_free_again_when_its_request_has_ended(build):
    house = await build(max_inflight=1)
    for _ in range(3):
        house.verifier.answers("x")
        assert [piece async for piece in house.stub.Generate(REQUEST)]


async def test_a_redis_that_dies_mid_stream_does_not_stop_the_stream(build, own_redis):
    house = await build(redis_url=own_redis.url)
    house.verifier.registers()
    house.verifier.commits("one ")
    call = house.stub.Generate(REQUEST)
    texts = [(await call.read()).text]
    own_redis.kill()
    house.verifier.commits("two ")
    house.verifier.commits("three")
    house.verifier.finishes(LENGTH)
    while (piece := await call.read()) is not grpc.aio.EOF:
        texts.append(piece.text)
    assert "".join(texts) == "one two three"


async def test_without_redis_a_new_request_is_answered_all_the_same(build, own_redis):
    house = await build(redis_url=own_redis.url)
    own_redis.kill()
    house.verifier.registers()
    house.verifier.commits("one")
    house.verifier.finishes(LENGTH)
    call = house.stub.Generate(REQUEST)
    texts: list[str] = []
    while (piece := await call.read()) is not grpc.aio.EOF:
        texts.append(piece.text)
    assert "".join(texts) == "one"


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "what?"])
async def test_no_redis_at_start_is_one_line_that_says_what_to_do(url):
    with pytest.raises(StartError) as caught:
        await SessionStore.connect(url, 60)
    message = str(caught.value)
    assert url in message
    assert "redis.url" in message
    assert "\n" not in message
