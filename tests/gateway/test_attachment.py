"""A drafter is asked to join beside the token path, and asked again when it is lost."""

import asyncio

from protos import common_pb2, inference_pb2, verifier_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
JOINED = verifier_pb2.DRAFTER_STATE_JOINED
LOST = verifier_pb2.DRAFTER_STATE_LOST
REQUEST = inference_pb2.GenerateRequest(text="hi")


async def next_attach(house):
    return await asyncio.wait_for(house.attaches.get(), 5.0)


async def test_a_drafter_is_asked_once_the_session_is_registered(house):
    call = house.stub.Generate(REQUEST)
    await house.verifier.called.wait()
    assert house.attaches.empty()
    house.verifier.registers()
    attach = await next_attach(house)
    run = house.verifier.requests[0]
    assert attach.session_id == run.session_id
    assert attach.verifier_address == house.verifier.address
    assert attach.epoch > run.epoch
    call.cancel()


async def test_no_drafter_is_asked_without_speculation(house):
    house.verifier.answers("x")
    request = inference_pb2.GenerateRequest(text="hi", speculation=False)
    assert [piece async for piece in house.stub.Generate(request)]
    assert house.attaches.empty()
    assert not house.verifier.requests[0].speculation


async def test_a_lost_drafter_is_replaced_by_another_with_a_higher_epoch(build):
    house = await build(drafters=2)
    house.verifier.registers()
    call = house.stub.Generate(REQUEST)
    first = await next_attach(house)
    house.verifier.reports(JOINED)
    await call.read()
    house.verifier.reports(LOST)
    second = await next_attach(house)
    assert second.epoch > first.epoch
    assert second.drafter != first.drafter
    call.cancel()


async def test_the_only_drafter_is_asked_again_after_its_restart(house):
    house.verifier.registers()
    call = house.stub.Generate(REQUEST)
    epochs = [(await next_attach(house)).epoch]
    for _ in range(2):
        house.verifier.reports(JOINED)
        await call.read()
        house.verifier.reports(LOST)
        epochs.append((await next_attach(house)).epoch)
    assert epochs == sorted(set(epochs))
    call.cancel()


async def test_one_loss_reported_by_many_events_is_one_attach(house):
    house.verifier.registers()
    call = house.stub.Generate(REQUEST)
    await next_attach(house)
    house.verifier.reports(JOINED)
    for _ in range(5):
        house.verifier.reports(LOST)
    house.verifier.finishes(LENGTH)
    while (await call.read()).finish_reason != LENGTH:
        pass
    assert house.attaches.qsize() == 1


async def test_a_drafter_that_fails_is_asked_again_while_tokens_flow(build):
    house = await build(failures=2)
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    assert (await call.read()).text == "a"
    epochs = [(await next_attach(house)).epoch for _ in range(3)]
    assert epochs == sorted(set(epochs))
    call.cancel()


async def test_a_service_without_drafters_answers_plainly(build):
    house = await build(drafters=0)
    house.verifier.answers("x")
    assert [piece.text async for piece in house.stub.Generate(REQUEST)] == ["x", ""]
