"""Health, reflection, metrics, and how the gateway starts and stops."""

import asyncio
import socket

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from coppice.errors import StartError
from coppice.redis_calls import redis_client
from coppice.registry import Registry
from coppice.settings import GatewaySettings
from gateway.membership import Membership
from gateway.router import Router
from gateway.server import GatewayServer
from gateway.sessions import SessionStore
from protos import common_pb2, inference_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "coppice.v1.Inference"
REQUEST = inference_pb2.GenerateRequest(text="hi", speculation=False)


async def until_status(house, service, status):
    stub = health_pb2_grpc.HealthStub(house.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    while (await asyncio.wait_for(watch.read(), 5.0)).status != status:
        pass
    watch.cancel()


async def http_get(house, path):
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{house.server.http_port}{path}")


async def samples(house):
    """All samples of /metrics as {(name, labels): value}."""
    answer = await http_get(house, "/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_readiness_follows_the_verifier_and_liveness_does_not(house):
    await until_status(house, SERVICE, SERVING)
    await house.verifier.die()
    await until_status(house, SERVICE, NOT_SERVING)
    await until_status(house, "", SERVING)
    await house.verifier.start()
    await until_status(house, SERVICE, SERVING)


async def test_reflection_lists_the_services(house):
    stub = reflection_pb2_grpc.ServerReflectionStub(house.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    call.cancel()


async def test_metrics_count_requests_by_code_and_time_their_tokens(house):
    house.verifier.registers()
    house.verifier.commits("a")
    house.verifier.commits("bc", finish_reason=common_pb2.FINISH_REASON_LENGTH)
    assert [piece async for piece in house.stub.Generate(REQUEST)]
    with pytest.raises(grpc.aio.AioRpcError):
        await house.stub.Generate(inference_pb2.GenerateRequest()).read()
    metrics = await samples(house)
    assert metrics["coppice_requests_total", (("code", "OK"),)] == 1
    assert metrics["coppice_requests_total", (("code", "INVALID_ARGUMENT"),)] == 1
    assert metrics["coppice_time_to_first_token_seconds_count", ()] == 1
    assert metrics["coppice_inter_token_latency_seconds_count", ()] == 2
    assert metrics["coppice_sessions", (("state", "streaming"),)] == 0


async def test_metrics_show_where_running_sessions_are(house):
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    await call.read()
    metrics = await samples(house)
    assert metrics["coppice_sessions", (("state", "streaming"),)] == 1
    assert metrics["coppice_sessions", (("state", "waiting"),)] == 0
    assert metrics["coppice_registered_sessions", ()] >= 1
    call.cancel()


async def test_metrics_hold_those_of_every_worker_that_answers(build):
    house = await build(verifiers=2)
    metrics = await samples(house)
    for name in ("verifier-0", "verifier-1"):
        assert metrics["coppice_queue_depth", (("worker", name),)] == 3


async def test_failed_calls_to_redis_are_counted(build, own_redis):
    house = await build(redis_url=own_redis.url)
    own_redis.kill()
    house.verifier.registers()
    house.verifier.commits("one")
    await house.stub.Generate(REQUEST).read()
    assert (await samples(house))["coppice_redis_errors_total", ()] >= 1


async def test_healthz_tells_alive_ready_and_redis(house):
    health = (await http_get(house, "/healthz")).json()
    assert health == {"alive": True, "ready": True, "redis": True}


@pytest.mark.parametrize("setting", ["port", "http_port"])
async def test_a_taken_port_is_one_line_that_names_the_setting(setting, tokenizer, shared_redis):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = GatewaySettings(**{"port": 0, "http_port": 0, setting: port})
        store = await SessionStore.connect(shared_redis.url, 60)
        router = Router([], [])
        membership = Membership(router, Registry(redis_client(shared_redis.url), "n"), str, str)
        server = GatewayServer(
            settings, tokenizer, common_pb2.ModelInfo(), router, store, membership
        )
        with pytest.raises(StartError) as caught:
            await server.start()
        await server.stop(0.0)
    message = str(caught.value)
    assert f"gateway.{setting}" in message
    assert str(port) in message
    assert "\n" not in message


async def test_stopping_lets_running_streams_end_within_the_grace(house):
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    await call.read()
    stopping = asyncio.create_task(house.server.stop(5.0))
    house.verifier.commits("b", finish_reason=common_pb2.FINISH_REASON_LENGTH)
    assert (await call.read()).text == "b"
    await asyncio.wait_for(stopping, 4.0)


async def test_stopping_cancels_what_runs_longer_than_the_grace(house):
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(REQUEST)
    await call.read()
    await asyncio.wait_for(house.server.stop(0.1), 5.0)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call.read()
    await asyncio.wait_for(house.verifier.cancelled.wait(), 5.0)
