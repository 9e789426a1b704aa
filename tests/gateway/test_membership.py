"""Workers join and leave while traffic runs, and without Redis those that are known serve on."""

import asyncio
from pathlib import Path

import grpc
import pytest

from coppice.registry import WorkerRecord
from protos import common_pb2, inference_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
REQUEST = inference_pb2.GenerateRequest(text="hi", speculation=False)


async def until(condition):
    async with asyncio.timeout(8.0):
        while not condition():  # noqa: ASYNC110 - the gateway polls
            await asyncio.sleep(0.02)


def verifier(name, sessions=0, state="serving"):
    return WorkerRecord(name, "verifier", "", "", sessions, state)


def drafter(name, target_hash="", sessions=0, state="serving"):
    return WorkerRecord(name, "drafter", target_hash, "", sessions, state)


def names(links):
    return {link.name for link in links}


async def text_of(call):
    texts = []
    while (piece := await asyncio.wait_for(call.read(), 8.0)) is not grpc.aio.EOF:
        texts.append(piece.text)
    return "".join(texts)


@pytest.fixture
async def pair(build):
    """A house with one verifier, and another one that it is not told of."""
    house = await build(verifiers=2)
    newcomer = house.verifiers.pop()
    await house.router.drop_verifier(house.router.verifiers[1])
    house.newcomers[newcomer.name] = newcomer
    return house, newcomer


async def test_a_verifier_that_registers_gets_sessions(pair):
    house, newcomer = pair
    await house.registry.put(verifier(newcomer.name))
    await until(lambda: house.router.reachable == 2)
    house.router.verifiers[0].load.own += 1
    newcomer.answers("new")
    assert await text_of(house.stub.Generate(REQUEST)) == "new"


async def test_a_draining_verifier_gets_no_more_sessions_and_its_streams_go_on(pair):
    house, newcomer = pair
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    await call.read()
    await house.registry.put(verifier(newcomer.name))
    await house.registry.put(verifier("verifier-0", state="draining"))
    await until(lambda: house.router.reachable == 2 and house.router.verifiers[0].draining)
    for _ in range(3):
        newcomer.answers("new")
        assert await text_of(house.stub.Generate(REQUEST)) == "new"
    house.verifier.finishes(LENGTH)
    assert (await call.read()).finish_reason == LENGTH


async def test_a_verifier_that_leaves_is_forgotten_and_its_streams_go_on_elsewhere(pair):
    house, newcomer = pair
    house.verifier.registers()
    house.verifier.commits("one ")
    call = house.stub.Generate(REQUEST)
    texts = [(await call.read()).text]
    await house.registry.put(verifier(newcomer.name))
    await until(lambda: house.router.reachable == 2)
    newcomer.answers("two")
    await house.registry.put(verifier("verifier-0", state="left"))
    texts.append(await text_of(call))
    assert "".join(texts) == "one two"
    assert names(house.router.verifiers) == {newcomer.name}


async def test_a_silent_verifier_is_used_only_where_there_is_no_other(pair):
    house, newcomer = pair
    await house.registry.put(verifier("verifier-0"))
    await house.registry.put(verifier(newcomer.name))
    await until(lambda: house.router.reachable == 2)
    await house.forget("verifier-0")
    await until(lambda: not house.router.verifiers[0].registered)
    assert {house.router.pick_verifier().name for _ in range(20)} == {newcomer.name}
    assert house.router.pick_verifier(excluded={newcomer.name}).name == "verifier-0"


async def test_the_load_that_other_gateways_bring_counts(pair):
    house, newcomer = pair
    await house.registry.put(verifier("verifier-0", sessions=7))
    await house.registry.put(verifier(newcomer.name, sessions=3))
    await until(lambda: house.router.reachable == 2 and house.router.verifiers[1].load.total == 3)
    assert house.router.pick_verifier().name == newcomer.name
    house.router.verifiers[1].load.own += 5
    assert house.router.pick_verifier().name == "verifier-0"


async def test_drafters_join_with_their_target_and_leave(house):
    await house.registry.put(drafter("drafter-0", target_hash="t", sessions=2))
    await house.registry.put(drafter("drafter-1", target_hash="other"))
    await until(lambda: names(house.router.drafters) == {"drafter-0", "drafter-1"})
    assert house.router.pick_drafter("t").name == "drafter-0"
    assert house.router.pick_drafter("other").name == "drafter-1"
    assert house.router.drafters[0].load.total == 2
    await house.registry.put(drafter("drafter-0", state="left"))
    await until(lambda: names(house.router.drafters) == {"drafter-1"})


async def test_a_silent_drafter_is_asked_only_where_there_is_no_other(house):
    await house.registry.put(drafter("drafter-0"))
    await house.registry.put(drafter("drafter-1", sessions=5))
    await until(lambda: len(house.router.drafters) == 2)
    assert house.router.pick_drafter("t").name == "drafter-0"
    await house.forget("drafter-0")
    await until(lambda: house.router.pick_drafter("t").name == "drafter-1")
    assert house.router.drafters[0].name == "drafter-0"


async def test_workers_that_were_known_from_the_start_need_not_register(house):
    await house.registry.put(drafter("drafter-9"))
    await until(lambda: "drafter-9" in names(house.router.drafters))
    assert names(house.router.drafters) == {"drafter-0", "drafter-9"}
    assert house.router.verifiers[0].registered


async def test_without_redis_the_known_workers_serve_on(build, own_redis):
    house = await build(redis_url=own_redis.url)
    await house.registry.put(drafter("drafter-0"))
    await until(lambda: house.router.drafters)
    own_redis.kill()
    await until(lambda: not house.server._membership.redis_reachable)
    house.verifier.answers("x")
    assert await text_of(house.stub.Generate(REQUEST)) == "x"
    assert names(house.router.drafters) == {"drafter-0"}


async def test_a_redis_that_comes_back_empty_has_not_lost_the_workers(build, own_redis):
    house = await build(redis_url=own_redis.url)
    followed = house.server._membership
    await house.registry.put(drafter("drafter-0", target_hash="t"))
    await until(lambda: house.router.drafters[0].target_hash == "t")
    own_redis.kill()
    await until(lambda: not followed.redis_reachable)
    again = type(own_redis)(Path(own_redis.url.removeprefix("unix://")).parent)
    await until(lambda: followed.redis_reachable)
    await followed.refresh()
    assert house.router.drafters[0].registered
    followed._complete_from = 0.0  # as if the time to register again were over
    await until(lambda: not house.router.drafters[0].registered)
    again.kill()
