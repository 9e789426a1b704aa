"""Every rank of a verifier but the first, as Ray actors beside it or on other hosts.

The first rank's actor owns them: they end with its process, and where one of them ends it ends
itself. So Ray, which restarts the first, brings back the whole group.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coppice import __version__
from coppice.errors import StartError
from coppice.models.loading import target_hash
from coppice.models.placement import fingerprint
from coppice.settings import Settings, VerifierSettings
from coppice.telemetry import configure_logging
from kernels import ops
from protos.common_pb2 import ModelInfo
from verifier_svc.ranks import JOIN_SECONDS, LOOPBACK, Address, Ranks
from verifier_svc.target import Target, threads_of
from verifier_svc.tensor_parallel import follow

LOAD_SECONDS = 600.0  # for a rank to be placed, too, whose host is away

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is, and what it has there."""

    node: str  # Ray's id of its host
    address: str  # by which the other ranks reach it
    version: str
    target_hash: str
    numerics: str  # fingerprint

    @classmethod
    def of(cls, ranks: Ranks, target_hash: str, numerics: str) -> "Seat":
        """The calling process's."""
        node = ray.get_runtime_context().get_node_id()
        return cls(node, ranks.host, __version__, target_hash, numerics)


class Follower:
    """One rank, wrapped by `ray.remote`. Its shard is loaded at construction."""

    def __init__(self, settings: Settings, name: str, rank: int) -> None:
        configure_logging(f"{name}/{rank}", settings.log_level)
        verifier = settings.verifier
        ops.set_threads(threads_of(verifier, rank))
        target = Target.of(settings)
        self._verifier = verifier
        host = meeting_address(verifier)
        self._ranks = Ranks(rank, verifier.tensor_parallel, target.device, host=host)
        self._model = target.load_shard(self._ranks)
        numerics = fingerprint(
            target.dtype, target.device, target.quantize, verifier.tensor_parallel
        )
        self._seat = Seat.of(self._ranks, target_hash(target.path), numerics)

    def loaded(self) -> Seat:
        """Returns when the shard is there."""
        return self._seat

    def serve(self, first: Address, nodes: Sequence[str], slots: int) -> None:
        """Joins the first rank, and runs its passes until it has no further one. `nodes` are the
        hosts of all ranks."""
        try:
            ops.set_threads(threads_of(self._verifier, self._ranks.rank, nodes))
            join_in_time(self._ranks, first)
            follow(self._model, slots)
            self._ranks.leave()
        except Exception:
            log.exception("the group is broken")
            os._exit(1)  # an exchange may still hang in a thread or on a GPU


def join_in_time(ranks: Ranks, first: Address) -> None:
    """Joins, or ends the process after JOIN_SECONDS: no exception reaches a thread that torch lets
    listen for ever."""
    hanging = threading.Timer(JOIN_SECONDS, os._exit, (1,))
    hanging.start()
    ranks.join(first)
    hanging.cancel()


class Followers:
    """The handles of all of them, as the first rank's actor has them."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Starts them; they load while the first rank does. None where there is one rank alone."""
        self._verifier = settings.verifier
        self._stopping = False
        self._watching: list[asyncio.Task[None]] = []
        ranks = range(1, settings.verifier.tensor_parallel)
        self._actors = [_start(settings, name, rank) for rank in ranks]

    async def join(self, ranks: Ranks, info: ModelInfo, on_end: Callable[[], None]) -> None:
        """Returns when all ranks are there. From then on they follow, and `on_end` is called as
        soon as one is gone. Raises StartError when one could not start, or is not of the kind of
        the first, which `info` describes; TimeoutError when one does not join."""
        own = Seat.of(ranks, info.target_hash, info.numerics_fingerprint)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                others = await asyncio.gather(*(actor.loaded.remote() for actor in self._actors))
        except TimeoutError:
            raise StartError(f"not all ranks were there within {LOAD_SECONDS:g} s") from None
        except RayError as error:
            raise StartError(_reason(error)) from error
        check_alike(own, others)
        nodes = [own.node, *(seat.node for seat in others)]
        ops.set_threads(threads_of(self._verifier, 0, nodes))
        first = ranks.open()
        for actor in self._actors:
            watch = self._watch(actor.serve.remote(first, nodes, info.kv_slots), on_end)
            self._watching.append(asyncio.create_task(watch))
        await asyncio.wait_for(asyncio.to_thread(ranks.join, first), JOIN_SECONDS)

    def expect_end(self) -> None:
        """From now on they may end."""
        self._stopping = True

    async def _watch(self, serving: Any, on_end: Callable[[], None]) -> None:
        try:
            await serving
        except RayError:
            log.exception("a rank is gone")
        if not self._stopping:
            on_end()


def check_alike(first: Seat, others: Sequence[Seat]) -> None:
    """Raises StartError where a rank has another version or checkpoint than the first, or other
    arithmetic: then a restart that places them otherwise would change an answer's bits."""
    for rank, seat in enumerate(others, 1):
        for what in ("version", "target_hash", "numerics"):
            theirs, ours = getattr(seat, what), getattr(first, what)
            if theirs != ours:
                raise StartError(
                    f"rank {rank} at {seat.address} has {what} {theirs}, the first one at "
                    f"{first.address} {ours}: all hosts of a verifier must be alike"
                )


def node_address() -> str:
    """This host's, as Ray knows it."""
    return str(get_node_ip_address())


def meeting_address(verifier: VerifierSettings) -> str:
    """Of this host, by which other ranks reach the one here. Ranks that are on one host in any case
    listen to nobody outside."""
    return LOOPBACK if verifier.placement == "strict_pack" else node_address()


def _start(settings: Settings, name: str, rank: int) -> Any:
    group = get_current_placement_group()
    assert group is not None, "all ranks are placed together"
    actor = ray.remote(Follower).options(
        num_cpus=0,
        num_gpus=group.bundle_specs[rank].get("GPU", 0),
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        ),
    )
    return actor.remote(settings, name, rank)


def _reason(error: RayError) -> str:
    """The rank's own StartError out of what Ray made of it, or Ray's last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line.partition(f"{StartError.__name__}: ")[2] for line in lines]
    return next((line for line in reversed(own) if line), lines[-1] if lines else "a rank is gone")
