"""The public gRPC door, and the gateway as one object that starts and stops."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice.errors import ResourceExhausted, StartError, Unavailable
from coppice.settings import GatewaySettings
from coppice.telemetry import exposition, merge_expositions
from coppice.tokenizer import Tokenizer
from gateway.generation import Generation, Services
from gateway.grammar_trial import GrammarTrial
from gateway.http import HttpServer, create_app
from gateway.interceptor import BoundaryInterceptor
from gateway.membership import Membership
from gateway.metrics import GatewayMetrics
from gateway.router import Router
from gateway.sessions import SessionStore
from gateway.validation import Door, Order
from protos import common_pb2, inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", 16 << 20),
)

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """`coppice.v1.Inference`. Errors are turned into statuses by the interceptor."""

    def __init__(self, services: Services, door: Door, max_inflight: int) -> None:
        self._services = services
        self._door = door
        self._max_inflight = max_inflight
        self._inflight = 0

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        arrived = time.monotonic()
        with self._admitted():
            order = await self._door.generate(request)
            async for piece in self._generate(order, arrived, context):
                yield piece

    async def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        arrived = time.monotonic()
        with self._admitted():
            order = await self._door.chat(request)
            async for piece in self._generate(order, arrived, context):
                yield piece

    async def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> common_pb2.ModelInfo:
        self._door.check_model(request.model)
        return self._services.model

    async def _generate(
        self, order: Order, arrived: float, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        remaining = cast("float | None", context.time_remaining())
        deadline = None if remaining is None else time.monotonic() + remaining
        generation = Generation(self._services, order, arrived, deadline)
        async with contextlib.aclosing(generation.responses()) as pieces:
            async for piece in pieces:
                yield piece

    @contextlib.contextmanager
    def _admitted(self) -> Generator[None]:
        if self._inflight >= self._max_inflight:
            raise ResourceExhausted(
                f"{self._inflight} requests are running, the most that this gateway takes "
                "(gateway.max_inflight); try again in 1 s"
            )
        self._inflight += 1
        try:
            yield
        finally:
            self._inflight -= 1


class GatewayServer:
    """Both doors. Owns the router, its membership and the session store from `start` on, and
    closes them."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: Tokenizer,
        model_info: common_pb2.ModelInfo,
        router: Router,
        sessions: SessionStore,
        membership: Membership,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._services = Services(
            model_info, tokenizer, router, sessions, GatewayMetrics(), settings.recovery_seconds
        )
        self._grammars = GrammarTrial(tokenizer, model_info)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._followers: list[asyncio.Task[None]] = []
        self.port = 0
        self.http_port = 0

    async def start(self) -> int:
        """Serves; returns the gRPC port. Raises StartError when a port is taken."""
        settings = self._settings
        listener = _listen(settings.host, settings.http_port, "gateway.http_port")
        try:
            self.port = await self._start_grpc()
        except BaseException:
            listener.close()
            raise
        self.http_port = int(listener.getsockname()[1])
        ready = self._services.router.ready.is_set
        app = create_app(self._all_metrics, ready, self._redis_reachable)
        self._http = HttpServer(app, listener)
        self._http.start()
        on_error = self._services.metrics.redis_errors.inc
        self._followers = [
            asyncio.create_task(self._follow_readiness()),
            asyncio.create_task(self._membership.follow(on_error)),
        ]
        return self.port

    async def stop(self, grace: float) -> None:
        """Takes no more requests, gives the running ones `grace` seconds, then cancels them."""
        for follower in self._followers:
            follower.cancel()
        if self._server is not None:
            await self._health.set(SERVICE.full_name, health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._server.stop(grace)
        if self._http is not None:
            await self._http.stop()
        await self._grammars.close()
        await self._services.router.close()
        await self._services.sessions.close()
        await self._membership.close()

    async def _start_grpc(self) -> int:
        settings = self._settings
        # grpc would print its own complaint about a taken port, so ask the system first.
        _listen(settings.host, settings.port, "gateway.port").close()
        server = grpc.aio.server(
            interceptors=[BoundaryInterceptor(SERVICE, self._services.metrics)],
            options=SERVER_OPTIONS,
        )
        services = self._services
        door = Door(services.tokenizer, services.model, self._grammars)
        servicer = InferenceServicer(services, door, settings.max_inflight)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        await self._health.set(SERVICE.full_name, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = server.add_insecure_port(_address(settings.host, settings.port))
        await server.start()
        self._server = server
        return port

    async def _follow_readiness(self) -> None:
        """Keeps the health service in step with the router."""
        router, status = self._services.router, health_pb2.HealthCheckResponse
        while True:
            await router.ready.wait()
            await self._health.set(SERVICE.full_name, status.SERVING)
            await router.away.wait()
            await self._health.set(SERVICE.full_name, status.NOT_SERVING)

    def _redis_reachable(self) -> bool:
        return self._membership.redis_reachable

    async def _all_metrics(self) -> str:
        """The gateway's own metrics and those of all workers as one exposition."""
        metrics, router = self._services.metrics, self._services.router
        workers = await router.worker_metrics()
        metrics.workers.labels("verifier").set(router.reachable)
        metrics.workers.labels("drafter").set(len(router.drafters))
        try:
            metrics.registered_sessions.set(await self._services.sessions.count())
        except Unavailable:
            metrics.redis_errors.inc()
        return merge_expositions({"": exposition(metrics.registry), **workers})


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. Raises StartError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartError(
            f"{setting}: cannot listen on {_address(host, port)} ({error.strerror}); stop what "
            "uses it or set another port"
        ) from None
