"""What stands in Redis about a session."""

import json
import struct

import pytest

from gateway.sessions import LIVE_KEY, SessionRecord, SessionStore, log_key, session_key
from protos import common_pb2, inference_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
TTL = 60


@pytest.fixture
async def store(shared_redis):
    store = await SessionStore.connect(shared_redis.url, TTL)
    yield store
    await store.close()


def record(session_id):
    return SessionRecord(session_id, 1, 5, "tiny", "verifier-0", "bits-1", "{}", (1, 2**31 - 1))


async def test_a_running_session_can_be_read_by_another_gateway(house, redis):
    house.verifier.registers()
    house.verifier.commits("ab")
    sampling = common_pb2.SamplingParams(seed=9, temperature=0.5)
    request = inference_pb2.GenerateRequest(text="hey", sampling=sampling)
    call = house.stub.Generate(request)
    request_id = (await call.read()).request_id
    fields = {k.decode(): v for k, v in (await redis.hgetall(session_key(request_id))).items()}
    assert fields["state"] == b"running"
    assert fields["seed"] == b"9"
    assert (fields["model"], fields["verifier"]) == (b"tiny", b"verifier-0")
    assert fields["numerics_fingerprint"] == b"bits-1"
    assert struct.unpack("<3I", fields["prompt"]) == tuple(b"hey")
    assert json.loads(fields["params"])["sampling"]["temperature"] == 0.5
    assert int(fields["epoch"]) == house.verifier.requests[0].epoch
    assert await redis.zscore(LIVE_KEY, request_id)
    call.cancel()


async def test_the_log_holds_every_token_that_the_client_got(house, redis):
    house.verifier.registers()
    house.verifier.commits("ab")
    call = house.stub.Generate(inference_pb2.GenerateRequest(text="hey"))
    sent = bytearray()
    for step in ("ab", "cde", "f"):
        piece = await call.read()
        sent += bytes(piece.token_ids)
        logged = await redis.lrange(log_key(piece.request_id), 0, -1)
        assert bytes(int(token) for token in logged) == bytes(sent)
        house.verifier.commits({"ab": "cde", "cde": "f", "f": "z"}[step])
    call.cancel()


async def test_a_finished_session_stays_readable_but_is_not_running(house, redis):
    house.verifier.answers("ab")
    pieces = [p async for p in house.stub.Generate(inference_pb2.GenerateRequest(text="hey"))]
    request_id = pieces[0].request_id
    assert await redis.hget(session_key(request_id), "state") == b"finished"
    assert await redis.zscore(LIVE_KEY, request_id) is None


async def test_everything_of_a_session_expires(store, redis):
    await store.register(record("expiring"))
    await store.append("expiring", [1, 2])
    for key in (session_key("expiring"), log_key("expiring"), LIVE_KEY):
        assert 0 < await redis.ttl(key) <= TTL


async def test_running_sessions_are_counted(own_redis):
    store = await SessionStore.connect(own_redis.url, TTL)
    for name in ("a", "b", "c"):
        await store.register(record(name))
    await store.finish("a")
    await store.remove("b")
    assert await store.count() == 1
    await store.close()


async def test_a_removed_session_leaves_nothing(store, redis):
    await store.register(record("gone"))
    await store.append("gone", [1])
    await store.remove("gone")
    assert not await redis.exists(session_key("gone"), log_key("gone"))
