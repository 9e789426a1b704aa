"""Two hosts with their own addresses. One is cut off mid-stream, and joined again."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from benchmarks.hosts import Host, HostedService, namespaces_fault, service_on_hosts
from coppice.redis_calls import close_client, redis_client
from coppice.registry import Registry
from gateway.sessions import session_key
from protos import common_pb2, inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 240
LONGEST_PAUSE_SECONDS = 40.0  # keepalive takes 15 of them


@dataclass
class Cluster:
    service: HostedService
    stub: "inference_pb2_grpc.InferenceAsyncStub"
    registry: Registry
    redis: Redis

    async def verifier_on(self, host: Host) -> str:
        records = await self.registry.all()
        return next(
            record.name
            for record in records.values()
            if record.kind == "verifier" and record.address.startswith(f"{host.address}:")
        )

    async def serves_on(self, host: Host, question: str) -> bool:
        """Whether that host's verifier takes one of two sessions."""
        wanted = await self.verifier_on(host)
        calls = [self.start(question), self.start(f"Again: {question}")]
        runners = []
        for call in calls:
            runners.append(await self.runner(await call.read()))
        for call in calls:
            call.cancel()
        return wanted in runners

    async def runner(self, piece: inference_pb2.GenerateResponse) -> str:
        return (await self.redis.hget(session_key(piece.request_id), "verifier")).decode()

    def start(self, question: str, speculation: bool = True):
        request = inference_pb2.GenerateRequest(
            text=question,
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stopping=common_pb2.StoppingParams(max_tokens=TOKENS, ignore_eos=True),
            speculation=speculation,
        )
        return self.stub.Generate(request, timeout=300.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    if (fault := namespaces_fault()) is not None:
        # Beside the skip, which a quiet run only counts.
        warnings.warn(f"fail-over between hosts was NOT tested: {fault}", stacklevel=1)
        pytest.skip(f"no network namespaces: {fault}")
    flags = ("--model-dtype", "float32", "--speculation-budget", "fixed")
    with ExitStack() as parts:
        service = await asyncio.to_thread(parts.enter_context, service_on_hosts(*flags))
        client = redis_client(service.redis_url)
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            yield Cluster(service, stub, Registry(client, "coppice"), client)
        await close_client(client)


async def test_a_stream_survives_that_its_verifiers_host_is_cut_off(cluster: Cluster) -> None:
    cut = cluster.service.other
    verifier = await cluster.verifier_on(cut)
    question = "Count from one to ninety in words:"
    for attempt in range(8):  # the other verifier may be drawn, and has a cached beginning then
        call = cluster.start(f"{attempt}. {question}")
        pieces = [await call.read()]
        if await cluster.runner(pieces[0]) == verifier:
            break
        call.cancel()
    else:
        raise AssertionError(f"no session went to {verifier}")
    loop = asyncio.get_running_loop()
    cut.cut()
    longest, last = 0.0, loop.time()
    while (piece := await call.read()) is not grpc.aio.EOF:
        longest, last = max(longest, loop.time() - last), loop.time()
        pieces.append(piece)
    assert longest < LONGEST_PAUSE_SECONDS
    assert await cluster.runner(pieces[0]) != verifier
    plain = cluster.start(f"{attempt}. {question}", speculation=False)
    wanted = []
    while (piece := await plain.read()) is not grpc.aio.EOF:
        wanted += piece.token_ids
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    assert not any(piece.numerics_changed for piece in pieces)


async def test_a_host_that_was_cut_off_serves_again_once_it_is_joined(cluster: Cluster) -> None:
    cut = cluster.service.other
    cut.join()

    async def serves_again() -> bool:
        names = [record.address for record in (await cluster.registry.all()).values()]
        if not any(name.startswith(f"{cut.address}:") for name in names):
            return False
        return await cluster.serves_on(cut, "Name three rivers.")

    async with asyncio.timeout(90.0):
        while not await serves_again():  # noqa: ASYNC110 - it is in other processes
            await asyncio.sleep(0.5)
