"""The processes that hold one target together: `torch.distributed` with a bound on every wait.

What the host decides travels through gloo; what the model computes, through gloo between CPUs and
NCCL between GPUs. Nothing here adds: values are gathered whole, so that every rank does the same
arithmetic in the same order, whatever the size of a message.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from coppice.errors import StartError

# A rank that dies breaks its connections, which the others notice at once. This is for one that
# hangs, or whose host is cut off: it must outlast the longest that a rank computes between two
# exchanges.
WAIT_SECONDS = 20.0
JOIN_SECONDS = 120.0  # ranks may load at different speeds
LOOPBACK = "127.0.0.1"  # where all ranks are on one host
WORDS = 2048  # of a first message, which says how many are to follow

Address = tuple[str, int]  # host and port

# NCCL takes a bare name for a prefix.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


class Ranks:
    """One process's place in its group. Any exchange raises RuntimeError when a rank is gone, or
    does not take part for `wait_seconds`; then the group is of no use any more."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        wait_seconds: float = WAIT_SECONDS,
        host: str = LOOPBACK,
    ) -> None:
        """`host` is the address of this rank's host by which the others reach it. Raises StartError
        where that is none of the host's."""
        use_interface_of(host)
        self.rank = rank
        self.size = size
        self.device = device
        self.host = host
        self._wait = timedelta(seconds=wait_seconds)
        self._store: dist.TCPStore | None = None

    def open(self) -> Address:
        """The first rank alone: where the others find it."""
        # A socket of our own, since the store's would listen on every address of the host.
        listening = socket.create_server((self.host, 0))
        port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(
            self.host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return self.host, port

    def join(self, first: Address) -> None:
        """Returns when all ranks have joined, for which each must have loaded its shard. To a first
        rank whose host is cut off meanwhile torch listens for ever: after JOIN_SECONDS the caller
        has to end the process."""
        host, port = first
        wait = timedelta(seconds=JOIN_SECONDS)
        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=wait)
        store.set(str(self.rank), "")
        store.wait([str(rank) for rank in range(self.size)], wait)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=self._wait
        )
        self.beat()  # NCCL connects at the first exchange

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's `part`, of the same shape, in the order of ranks: [ranks, *part]."""
        parts = part.new_empty((self.size, *part.shape))  # [ranks, *part]
        dist.all_gather(list(parts.unbind(0)), part.contiguous())
        return parts

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        """The same, at the first rank alone; nothing elsewhere."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(part.contiguous(), parts or None, dst=0)
        return parts

    def send(self, words: Sequence[int]) -> None:
        """The first rank's message to all others, who `receive` it. Words are of 32 bits."""
        message = torch.tensor([len(words), *words], dtype=torch.int32)  # [1 + words]
        first = torch.zeros(WORDS, dtype=torch.int32)
        first[: len(message)] = message[:WORDS]
        dist.broadcast(first, 0)
        if len(message) > WORDS:
            dist.broadcast(message[WORDS:], 0)

    def receive(self) -> list[int]:
        first = torch.empty(WORDS, dtype=torch.int32)
        dist.broadcast(first, 0)
        count = int(first[0])
        words = first[1 : 1 + count].tolist()
        if count >= WORDS:
            rest = torch.empty(count - len(words), dtype=torch.int32)
            dist.broadcast(rest, 0)
            words += rest.tolist()
        return words

    def leave(self) -> None:
        """After the last exchange, or after one that failed."""
        dist.destroy_process_group()
        self._store = None

    def beat(self) -> None:
        """An exchange between devices that all ranks must answer."""
        self.all_gather(torch.zeros(1, device=self.device)).tolist()


def use_interface_of(address: str) -> None:
    """Has gloo and NCCL exchange through the network interface of this host that has `address`, but
    for what the user's environment says. Raises StartError where none has it."""
    for variable, exact in _INTERFACES.items():
        if variable not in os.environ:
            os.environ[variable] = exact + interface_of(address)


def interface_of(address: str) -> str:
    """The name of the network interface that has `address`. Raises StartError where none has it."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return name
    raise StartError(
        f"no network interface of this host has the address {address} by which Ray knows it: start "
        f"Ray with --node-ip-address, or set {' and '.join(_INTERFACES)} here"
    )
