"""The gateway's HTTP door: metrics and liveness."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Generator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

logger = logging.getLogger(__name__)


class Health(BaseModel):
    alive: bool = True
    ready: bool  # a verifier can be reached
    redis: bool  # without it the gateway serves with the workers that it knows


def create_app(
    metrics: Callable[[], Awaitable[str]], ready: Callable[[], bool], redis: Callable[[], bool]
) -> FastAPI:
    app = FastAPI(title="coppice", docs_url=None, redoc_url=None, openapi_url=None)

    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(await metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def show_health() -> Health:
        return Health(ready=ready(), redis=redis())

    app.add_api_route("/metrics", show_metrics, response_class=PlainTextResponse)
    app.add_api_route("/healthz", show_health)
    return app


class HttpServer:
    """Serves an app within the running event loop, on a socket that is already bound."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = _QuietServer(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()


class _QuietServer(uvicorn.Server):
    """Leaves the process's signals to the launcher."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
