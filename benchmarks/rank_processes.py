"""The ranks of a verifier as processes of this machine, without Ray: for measurements and tests.

The first rank is the calling process.
"""

import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess

from kernels import ops
from verifier_svc.ranks import WAIT_SECONDS, Address, Ranks
from verifier_svc.target import Target
from verifier_svc.tensor_parallel import LeadingRunner, follow

JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    runner: LeadingRunner
    followers: tuple[ForkServerProcess, ...]


@contextmanager
def rank_group(
    target: Target,
    size: int,
    slots: int,
    feature_layers: tuple[int, ...] = (),
    wait_seconds: float = WAIT_SECONDS,
    first: type[Ranks] = Ranks,
) -> Generator[RankGroup]:
    """The target over `size` ranks as long as the context; all but the `first` have one thread."""
    context = multiprocessing.get_context("forkserver")
    # One import of torch for all of them.
    context.set_forkserver_preload([__name__])
    ranks = first(0, size, target.device, wait_seconds)
    address = ranks.open()
    followers = tuple(
        context.Process(target=_follow, args=(target, rank, size, address, slots, wait_seconds))
        for rank in range(1, size)
    )
    for follower in followers:
        follower.start()
    try:
        model = target.load_shard(ranks)
        ranks.join(address)
        runner = LeadingRunner(model, slots, feature_layers)
        try:
            yield RankGroup(runner, followers)
        finally:
            runner.close()
    finally:
        for follower in followers:
            follower.join(JOIN_SECONDS)
            follower.kill()


def _follow(
    target: Target, rank: int, size: int, address: Address, slots: int, wait_seconds: float
) -> None:
    ops.set_threads(1)
    ranks = Ranks(rank, size, target.device, wait_seconds)
    model = target.load_shard(ranks)
    ranks.join(address)
    follow(model, slots)
    ranks.leave()
