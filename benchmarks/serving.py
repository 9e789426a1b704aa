"""The real service in a process of its own, so that who measures it is no part of it."""

import contextlib
from asyncio import Event, get_running_loop
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import httpx
import psutil
import ray
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from coppice.errors import CoppiceError, StartError
from coppice.settings import Settings
from launcher.compose import service
from launcher.signals import run_stoppable
from launcher.terminal import steps

STOP_SECONDS = 30.0
DRAFTER = "DrafterWorker"
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Served:
    """A service that answers."""

    address: str  # of the public gRPC door
    metrics_url: str
    verifiers: tuple[str, ...]  # addresses of their own gRPC doors
    pid: int  # of the gateway, above all other processes

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All that are alive, by the name that they give themselves."""
        found = {GATEWAY: [psutil.Process(self.pid)]}
        for each in found[GATEWAY][0].children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.setdefault(name_of(each), []).append(each)
        return found

    async def metrics(self) -> Mapping[str, float]:
        """Every series of the metrics page, summed over workers and labels, by its name."""
        return sums(await self._page())

    async def slots_in_use(self) -> float:
        """Token slots that sessions hold."""
        page = await self._page()
        lines = (line for line in page.splitlines() if line.startswith("coppice_kv_slots{"))
        return sum(float(line.split()[-1]) for line in lines if 'state="used"' in line)

    async def _page(self) -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(self.metrics_url)).text


def name_of(process: psutil.Process) -> str:
    """An actor's class out of Ray's title of its process, "ray::name:class.method"; else the
    program's name."""
    title = (process.cmdline() or [""])[0]
    if not title.startswith("ray::"):
        return process.name()
    return title.removeprefix("ray::").partition(".")[0].rpartition(":")[2]


def sums(page: str) -> dict[str, float]:
    """A page of metrics, each series summed over its labels, by its name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Processor time that they have used so far."""
    return sum(sum(each.cpu_times()[:2]) for each in processes)


@contextlib.contextmanager
def served(settings: Settings) -> Generator[Served, None, None]:
    """A service on free ports as long as the context. Raises StartError with its own message."""
    gateway = settings.gateway.model_copy(update={"port": 0, "http_port": 0})
    settings = settings.model_copy(update={"gateway": gateway})
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(settings, there))
    process.start()
    there.close()
    try:
        try:
            answer = here.recv()
        except EOFError:
            raise StartError("the service ended before it was ready") from None
        if isinstance(answer, str):
            raise StartError(answer)
        yield answer
    finally:
        here.close()
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()


def _serve(settings: Settings, pipe: Connection) -> None:
    async def until_closed() -> int:
        try:
            async with _announced(settings, pipe):
                closed = Event()
                get_running_loop().add_reader(pipe.fileno(), closed.set)
                await closed.wait()
        except CoppiceError as error:
            pipe.send(str(error))
        return 0

    raise SystemExit(run_stoppable(until_closed))


@contextlib.asynccontextmanager
async def _announced(settings: Settings, pipe: Connection) -> AsyncGenerator[None, None]:
    """The service, and the other end of the pipe is told where it is."""
    with steps(Console(quiet=True)) as shown:
        async with service(settings, shown) as running:
            names = [f"verifier-{index}" for index in range(settings.verifier.count)]
            actors: list[Any] = [
                ray.get_actor(name, namespace=settings.ray.namespace) for name in names
            ]
            addresses = [await actor.ready.remote() for actor in actors]
            metrics = f"http://{running.http_address}/metrics"
            pipe.send(Served(running.address, metrics, tuple(addresses), psutil.Process().pid))
            yield
