"""Every rank of a verifier but the first, as Ray actors beside it.

The first rank's actor owns them: they end with its process, and where one of them ends it ends
itself. So Ray, which restarts the first, brings back the whole group.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coppice.errors import StartError
from coppice.settings import Settings
from coppice.telemetry import configure_logging
from kernels import ops
from verifier_svc.ranks import Ranks
from verifier_svc.target import Target, threads_of
from verifier_svc.tensor_parallel import follow

log = logging.getLogger(__name__)


class Follower:
    """One rank, wrapped by `ray.remote`. Its shard is loaded at construction."""

    def __init__(self, settings: Settings, name: str, rank: int) -> None:
        configure_logging(f"{name}/{rank}", settings.log_level)
        ops.set_threads(threads_of(settings.verifier, rank))
        target = Target.of(settings)
        self._slots = settings.verifier.kv_slots
        self._ranks = Ranks(rank, settings.verifier.tensor_parallel, target.device)
        self._model = target.load_shard(self._ranks)

    def loaded(self) -> None:
        """Returns when the shard is there."""

    def serve(self, port: int) -> None:
        """Joins the first rank, and runs its passes until it has no further one."""
        try:
            self._ranks.join(port)
            follow(self._model, self._slots)
            self._ranks.leave()
        except Exception:
            log.exception("the group is broken")
            os._exit(1)  # an exchange may still hang in a thread or on a GPU


class Followers:
    """The handles of all of them, as the first rank's actor has them."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Starts them; they load while the first rank does. None where there is one rank alone."""
        self._stopping = False
        self._watching: list[asyncio.Task[None]] = []
        ranks = range(1, settings.verifier.tensor_parallel)
        self._actors = [_start(settings, name, rank) for rank in ranks]

    async def join(self, ranks: Ranks, on_end: Callable[[], None]) -> None:
        """Returns when all ranks are there. From then on they follow, and `on_end` is called as
        soon as one is gone. Raises StartError when one could not start."""
        try:
            await asyncio.gather(*(actor.loaded.remote() for actor in self._actors))
        except RayError as error:
            raise StartError(_reason(error)) from error
        port = ranks.open()
        for actor in self._actors:
            watch = self._watch(actor.serve.remote(port), on_end)
            self._watching.append(asyncio.create_task(watch))
        await asyncio.to_thread(ranks.join, port)

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
