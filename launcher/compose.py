"""Puts the parts together on this machine: model, Redis, Ray, workers, gateway."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coppice.models.hub import resolve_model
from coppice.redis_calls import redis_client
from coppice.registry import Registry
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from drafter_svc.building import draft_model_path
from gateway.membership import Membership
from gateway.ray_workers import RayDrafter, RayVerifier
from gateway.router import Router
from gateway.server import GatewayServer
from gateway.sessions import SessionStore
from launcher.cluster import ray_cluster
from launcher.fleet import Fleet, running_fleet
from launcher.ports import check_ports
from launcher.redis_server import check_redis, embedded_redis
from launcher.scaling import findable, scalable
from launcher.terminal import Steps
from protos.common_pb2 import ModelInfo

CONNECT_SECONDS = 30.0
STOP_SECONDS = 1.0
LONGEST_PARENT = 20  # characters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Running:
    """A service that answers."""

    address: str  # "host:port" of the gRPC door
    http_address: str  # of /metrics
    model: ModelInfo
    drafter: str
    seconds: float  # since its start began


@contextlib.asynccontextmanager
async def service(settings: Settings, steps: Steps) -> AsyncGenerator[Running, None]:
    """The whole, running as long as the context; everything started is stopped, come what may.

    Raises StartError. Enter it from the main thread.
    """
    began = time.monotonic()
    settings = named(settings)
    check_ports(settings.gateway)
    async with contextlib.AsyncExitStack() as parts:
        folder = parts.enter_context(private_folder())
        path = await off_loop(
            lambda: resolve_model(settings.model.path, settings.cache_dir, steps.advance)
        )
        if settings.speculation.drafter == "model":
            await off_loop(lambda: draft_model_path(settings, steps.advance))
        steps.begin("starting Redis")
        url = settings.redis.url
        if url is None:
            url = await parts.enter_async_context(embedded_redis(folder))
        await check_redis(url)
        settings = with_redis(settings, url)
        steps.begin("starting Ray")
        await parts.enter_async_context(ray_cluster(settings, folder))
        steps.begin("loading model and drafter")
        fleet = await parts.enter_async_context(running_fleet(settings))
        steps.begin("opening the gateway")
        gateway, model = await parts.enter_async_context(
            running_gateway(settings, path, url, fleet)
        )
        await parts.enter_async_context(scalable(settings, url, fleet))
        parts.enter_context(findable(settings, gateway.port, url))
        host = (
            f"[{settings.gateway.host}]" if ":" in settings.gateway.host else settings.gateway.host
        )
        yield Running(
            f"{host}:{gateway.port}",
            f"{host}:{gateway.http_port}",
            model,
            settings.speculation.drafter if fleet.drafter_names else "none",
            time.monotonic() - began,
        )


@contextlib.asynccontextmanager
async def running_gateway(
    settings: Settings, model_path: Path, redis_url: str, fleet: Fleet
) -> AsyncGenerator[tuple[GatewayServer, ModelInfo], None]:
    """Both doors open, and what is served behind them."""
    tokenizer = Tokenizer.load(model_path)
    sessions = await SessionStore.connect(redis_url, settings.redis.session_ttl_seconds)
    namespace = settings.ray.namespace

    def verifier(name: str) -> RayVerifier:
        return RayVerifier(name, namespace)

    def drafter(name: str) -> RayDrafter:
        return RayDrafter(name, namespace)

    router = Router(
        [verifier(name) for name in fleet.verifier_names],
        [drafter(name) for name in fleet.drafter_names],
    )
    registry = Registry(redis_client(redis_url), namespace)
    membership = Membership(router, registry, verifier, drafter)
    async with contextlib.AsyncExitStack() as parts:
        parts.push_async_callback(sessions.close)
        parts.push_async_callback(router.close)
        parts.push_async_callback(membership.close)
        model = await router.start(CONNECT_SECONDS)
        gateway = GatewayServer(settings.gateway, tokenizer, model, router, sessions, membership)
        await gateway.start()
        parts.pop_all()  # now the gateway's
        try:
            yield gateway, model
        finally:
            await gateway.stop(STOP_SECONDS)


def named(settings: Settings) -> Settings:
    """With the served name that the user did not give: the model as it was asked for."""
    if settings.model.served_name is not None:
        return settings
    name = settings.model.path.rstrip("/")
    model = settings.model.model_copy(update={"served_name": name})
    return settings.model_copy(update={"model": model})


def with_redis(settings: Settings, url: str) -> Settings:
    """With the server that is used, for the workers to register there."""
    redis = settings.redis.model_copy(update={"url": url})
    return settings.model_copy(update={"redis": redis})


@contextlib.contextmanager
def private_folder() -> Generator[Path, None, None]:
    """For sockets and logs. Ray's part of a socket's path leaves little of the 107 characters."""
    parent = tempfile.gettempdir()
    folder = Path(
        tempfile.mkdtemp(dir=parent if len(parent) <= LONGEST_PARENT else "/tmp", prefix="coppice-")
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def off_loop(work: Callable[[], T]) -> T:
    """`work` in a thread that does not outlive the process, unlike one of the loop's pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future
