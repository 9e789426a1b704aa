"""The Ray cluster and the workers on it: started, and ended without a trace."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from coppice.errors import CoppiceError, StartError
from coppice.settings import Settings
from drafter_svc.actor import DrafterWorker
from verifier_svc.actor import VerifierWorker

OBJECT_STORE_BYTES = 100 * 2**20  # Ray carries control calls only
READY_SECONDS = 600.0
STOP_SECONDS = 2.0
EXIT_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
CORE = ("gcs_server", "raylet")

# For every process of a cluster of our own, where the user has not set it.
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A worker that asks Ray for no GPU still sees those of the machine.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would set 1 for a worker that asks it for no cores.
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    # The pools of drafter and verifier share the cores: an idle one must not spin on them.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextlib.asynccontextmanager
async def ray_cluster(settings: Settings, folder: Path) -> AsyncGenerator[None, None]:
    """Ray as long as the context: the cluster of `ray.address`, or one on this machine alone.

    Raises StartError. Enter it from the main thread.
    """
    launcher = psutil.Process()
    others = set(launcher.children(recursive=True))
    try:
        with out_of_reach_of_sigterm():
            connect(settings, folder)
        yield
    finally:
        ours = set(launcher.children(recursive=True)) - others
        helpers = ours & set(launcher.children())
        # Ray would ask each of them in turn to go, and wait for a second.
        await asyncio.to_thread(kill, {each for each in helpers if name_of(each) not in CORE})
        ray.shutdown()
        await asyncio.to_thread(kill, ours)


def connect(settings: Settings, folder: Path) -> None:
    debug = settings.log_level == "debug"
    level = logging.DEBUG if debug else logging.ERROR
    address = settings.ray.address
    try:
        if address is not None:
            ray.init(address=address, namespace=settings.ray.namespace, logging_level=level)
            return
        chosen = {name: os.environ.get(name, value) for name, value in LOCAL_ENVIRONMENT.items()}
        with environment(chosen | {"TMPDIR": str(folder)}):
            ray.init(
                namespace=settings.ray.namespace,
                num_cpus=settings.verifier.count + settings.drafter.count,  # so many wait, warm
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=debug,
                logging_level=level,
                _temp_dir=str(folder),
                _node_ip_address=LOOPBACK,
            )
    except (RayError, OSError, ValueError, RuntimeError, ConnectionError) as error:
        where = f"at {address}" if address else "on this machine"
        raise StartError(f"Ray {where} did not start: {first_line(error)}") from None


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Generator[None, None, None]:
    """For the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def out_of_reach_of_sigterm() -> Generator[None, None, None]:
    """Processes started meanwhile never see SIGTERM, which may be sent to a whole group: who stops
    them, and in which order, is the launcher's to say. Undoes that Ray takes over the signal."""
    handler = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=EXIT_SECONDS)


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    handle: Any  # Ray's actor handle has no static type


@dataclass(frozen=True, slots=True)
class Workers:
    verifiers: tuple[Worker, ...]
    drafters: tuple[Worker, ...]

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.verifiers + self.drafters


@contextlib.asynccontextmanager
async def running_workers(settings: Settings) -> AsyncGenerator[Workers, None]:
    """All workers, ready; stopped at the end. Raises StartError with a worker's own message."""
    host = LOOPBACK if settings.ray.address is None else None
    drafter_count = 0 if settings.speculation.drafter == "none" else settings.drafter.count
    verifier, drafter = ray.remote(VerifierWorker), ray.remote(DrafterWorker)
    verifier_names = [f"verifier-{index}" for index in range(settings.verifier.count)]
    drafter_names = [f"drafter-{index}" for index in range(drafter_count)]
    workers = Workers(
        tuple(
            Worker(name, verifier.options(**options(name)).remote(settings, name, host))
            for name in verifier_names
        ),
        tuple(
            Worker(name, drafter.options(**options(name)).remote(settings, name))
            for name in drafter_names
        ),
    )
    try:
        await asyncio.gather(*(until_ready(worker) for worker in workers.all))
        yield workers
    finally:
        await asyncio.gather(*(stop(worker.handle) for worker in workers.all))


def options(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # a call to an actor that died fails at once: its caller decides
    }


async def until_ready(worker: Worker) -> None:
    try:
        await asyncio.wait_for(worker.handle.ready.remote(), READY_SECONDS)
    except TimeoutError:
        raise StartError(f"{worker.name} was not ready within {READY_SECONDS:g} s") from None
    except RayError as error:
        raise StartError(start_message(worker.name, error)) from None


async def stop(handle: Any) -> None:
    """Asks the worker to stop, then ends its process."""
    with contextlib.suppress(RayError, TimeoutError):
        await asyncio.wait_for(handle.stop.remote(), STOP_SECONDS)
    with contextlib.suppress(RayError):
        ray.kill(handle, no_restart=True)


def start_message(name: str, error: BaseException) -> str:
    """The worker's StartError out of what Ray made of it, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, CoppiceError):
        return str(cause)
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(text):
        prefix, found, message = line.partition(f"{StartError.__name__}: ")
        if found and not prefix.strip(".abcdefghijklmnopqrstuvwxyz_"):
            return message
    return f"{name} did not start: {text[-1] if text else type(error).__name__}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
