"""What stands in Redis about a session."""

import asyncio
import json
import struct
import time

import pytest
from redis.asyncio import Redis

from gateway.sessions import LIVE_KEY, SessionLog, SessionRecord, SessionStore, log_key, session_key
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
    await store.append("expiring", [1, 2], renew=True)
    for key in (session_key("expiring"), log_key("expiring"), LIVE_KEY):
        assert 0 < await redis.ttl(key) <= TTL


async def test_a_long_answer_outlives_its_time_without_asking_for_more_at_every_token(
    shared_redis, redis, monkeypatch
):
    store = await SessionStore.connect(shared_redis.url, 2)
    log = SessionLog(store, "long", lambda: pytest.fail("Redis is there"))
    await log.register(record("long"))
    renewals = []
    append = SessionStore.append

    async def noted(store, session_id, tokens, renew):
        renewals.append(renew)
        await append(store, session_id, tokens, renew)

    monkeypatch.setattr(SessionStore, "append", noted)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        await log.append([7])
        assert await redis.zscore(LIVE_KEY, "long") > time.time()
        await asyncio.sleep(0.02)
    assert renewals[0], "a log never stands there without an end"
    assert sum(renewals) <= 4 / store.renew_seconds + 1
    assert await redis.llen(log_key("long")) == len(renewals)
    assert await redis.hget(session_key("long"), "state") == b"running"
    await log.close(finished=True)
    assert 0 < await redis.ttl(log_key("long")) <= 2
    await store.close()


async def test_a_log_in_a_redis_that_came_back_empty_has_an_end(own_redis):
    store = await SessionStore.connect(own_redis.url, TTL)
    log = SessionLog(store, "lost", lambda: None)
    await log.register(record("lost"))
    await log.append([1])
    client = Redis.from_url(own_redis.url)
    await client.flushall()
    await log.append([2])
    await log.close(finished=True)
    assert 0 < await client.ttl(log_key("lost")) <= TTL
    await client.aclose()
    await store.close()


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
    await store.append("gone", [1], renew=True)
    await store.remove("gone")
    assert not await redis.exists(session_key("gone"), log_key("gone"))
