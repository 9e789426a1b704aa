"""The Ray cluster and the workers on it: started, and ended without a trace."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coppice.errors import CoppiceError, StartError, first_line
from coppice.settings import Settings
from drafter_svc.actor import DrafterWorker
from launcher.placement import NEXT_TO_NOTHING, first_rank, group_of_ranks, until_placed
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
                # So many wait, warm.
                num_cpus=settings.verifier.count * settings.verifier.tensor_parallel
                + settings.drafter.count,
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
    until = time.monotonic() + EXIT_SECONDS
    while processes and time.monotonic() < until:
        _, alive = psutil.wait_procs(processes, timeout=0.02)
        # The dead whose parent is gone stay listed where the first process of a container does
        # not ask after them.
        processes = {each for each in alive if status_of(each) != psutil.STATUS_ZOMBIE}


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def status_of(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    handle: Any  # Ray's actor handle has no static type
    group: PlacementGroup | None = None  # of a verifier's ranks


def place_verifier(settings: Settings, name: str) -> Worker:
    """An actor that begins to load; it listens where other hosts of the cluster reach it."""
    host = LOOPBACK if settings.ray.address is None else None
    group = group_of_ranks(settings)
    actor = ray.remote(VerifierWorker).options(**(options(settings, name) | first_rank(group)))
    return Worker(name, actor.remote(settings, name, host), group)


def place_drafter(settings: Settings, name: str) -> Worker:
    actor = ray.remote(DrafterWorker)
    return Worker(name, actor.options(**options(settings, name)).remote(settings, name))


def options(settings: Settings, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "num_cpus": NEXT_TO_NOTHING,  # for none at all Ray would take any host
        "max_restarts": -1,
        "max_task_retries": 0,  # a call to an actor that died fails at once: its caller decides
        "scheduling_strategy": host_in_turn(settings.model.device, name),
    }


def host_in_turn(device: str, name: str) -> NodeAffinitySchedulingStrategy:
    """Hosts (those with GPUs, where there are any to be used) take the workers of a kind in turn,
    so that a host that is lost takes few along. Once the host is gone another one will do."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with_gpu = [node for node in nodes if node["Resources"].get("GPU") and device != "cpu"]
    hosts = sorted(node["NodeID"] for node in with_gpu or nodes)
    number = int(name.rpartition("-")[2])
    return NodeAffinitySchedulingStrategy(hosts[number % len(hosts)], soft=True)


async def until_ready(worker: Worker) -> None:
    if worker.group is not None:
        await until_placed(worker.group, worker.name)
    try:
        await asyncio.wait_for(worker.handle.ready.remote(), READY_SECONDS)
    except TimeoutError:
        raise StartError(f"{worker.name} was not ready within {READY_SECONDS:g} s") from None
    except RayError as error:
        raise StartError(start_message(worker.name, error)) from None


async def stop(worker: Worker, grace_seconds: float) -> None:
    """Asks the worker to stop, running sessions after their grace, then ends its process."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(grace_seconds + STOP_SECONDS):
            await worker.handle.stop.remote(grace_seconds)
    with contextlib.suppress(RayError):
        ray.kill(worker.handle, no_restart=True)
        if worker.group is not None:
            await asyncio.to_thread(remove_placement_group, worker.group)


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
