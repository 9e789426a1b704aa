"""A client that does not read is waited for, and so nothing piles up for it."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from protos import common_pb2, inference_pb2
from protos.inference_pb2_grpc import InferenceStub

STEPS = 2000
PILE = 600  # steps in buffers and on the way, more than there are; without windows it is all
# With gRPC's own windows a client takes in megabytes that it does not read.
TIGHT = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


@pytest.fixture
async def stub(house) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.server.port}", TIGHT) as channel:
        yield InferenceStub(channel)


async def until_nothing_moves(house) -> int:
    """The steps that the verifier has left to send."""
    left = -1
    while left != house.verifier.script.qsize():
        left = house.verifier.script.qsize()
        for _ in range(50):  # round trips through the same gateway
            await house.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    return left


async def test_the_verifier_is_read_no_faster_than_the_client_reads(house, stub) -> None:
    house.verifier.registers()
    for _ in range(STEPS):
        house.verifier.commits("x")
    house.verifier.finishes(common_pb2.FINISH_REASON_LENGTH)
    call = stub.Generate(inference_pb2.GenerateRequest(text="hi", speculation=False))
    text = (await call.read()).text
    left = await until_nothing_moves(house)
    assert left > STEPS - PILE, "pieces pile up somewhere"
    for _ in range(100):
        text += (await call.read()).text
    assert left - await until_nothing_moves(house) < PILE
    while (piece := await call.read()) is not grpc.aio.EOF:
        text += piece.text
    assert text == "x" * STEPS
