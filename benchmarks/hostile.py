"""A drafter that takes sessions over and sends what no drafter must send."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from random import Random
from typing import TYPE_CHECKING

import grpc

from drafter_svc.wire import PROTOCOL_VERSION
from protos import verifier_pb2 as pb
from protos.verifier_pb2_grpc import VerifierStub

if TYPE_CHECKING:  # only the stub files know it
    from protos.verifier_pb2_grpc import VerifierAsyncStub

EPOCH = 1000  # above that of any gateway
AT_ONCE = 3  # trees in answer to a commit, at most

Stream = grpc.aio.StreamStreamCall[pb.DraftMessage, pb.VerifierMessage]


class HostileDrafter:
    """One stream to a verifier; every session that it is given is its own from then on."""

    def __init__(self, vocab_size: int, random: Random) -> None:
        self.sent = 0  # trees
        self._vocab_size = vocab_size
        self._random = random
        self._items: asyncio.Queue[pb.DraftItem] = asyncio.Queue()

    def take_over(self, session_id: str) -> None:
        join = pb.Join(session_id=session_id, epoch=EPOCH)
        self._items.put_nowait(pb.DraftItem(join=join))

    async def run(self, stub: "VerifierAsyncStub") -> None:
        """Until it is cancelled."""
        call = stub.Draft()
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            drafter_id="hostile",
            features=pb.FEATURE_KIND_NONE,
        )
        await call.write(pb.DraftMessage(items=[pb.DraftItem(hello=hello)]))
        writer = asyncio.create_task(self._write(call))
        try:
            while isinstance(message := await call.read(), pb.VerifierMessage):
                for item in message.items:
                    if item.WhichOneof("item") == "committed":
                        self._answer(item.committed)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(self, call: Stream) -> None:
        while True:
            await call.write(pb.DraftMessage(items=[await self._items.get()]))

    def _answer(self, committed: pb.Committed) -> None:
        trees = bad_trees(committed.session_id, committed.base_length, self._vocab_size)
        for tree in self._random.sample(trees, self._random.randint(1, AT_ONCE)):
            self._items.put_nowait(pb.DraftItem(tree=tree))
            self.sent += 1


@contextlib.asynccontextmanager
async def hostile_drafter(
    address: str, vocab_size: int, random: Random
) -> AsyncGenerator[HostileDrafter, None]:
    """At the verifier at `address`, as long as the context."""
    drafter = HostileDrafter(vocab_size, random)
    async with grpc.aio.insecure_channel(address) as channel:
        running = asyncio.create_task(drafter.run(VerifierStub(channel)))
        try:
            yield drafter
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def bad_trees(session_id: str, base: int, vocab_size: int) -> list[pb.Tree]:
    """One of each kind, in answer to `base` committed tokens. Some are well-formed: the last ones
    are of no use, but nothing says so."""

    def tree(
        tokens: list[int],
        parents: list[int],
        scores: list[float],
        base_length: int = base,
        epoch: int = EPOCH,
    ) -> pb.Tree:
        return pb.Tree(
            session_id=session_id,
            epoch=epoch,
            base_length=base_length,
            draft_id=base_length,
            tokens=tokens,
            parents=parents,
            scores=scores,
        )

    return [
        tree([7] * 3, [0] * 3, [-1.0] * 3),  # the same token twice below a node
        tree([7], [5], [-1.0]),  # a parent that is not there
        tree([7, 8], [2, 0], [-1.0, -1.0]),  # a parent after its child
        tree([vocab_size], [0], [-1.0]),
        tree([7], [0], [math.nan]),
        tree([7, 8], [0], [-1.0]),  # lists of different lengths
        tree(list(range(5000)), [0] * 5000, [-1.0] * 5000),  # far too large
        tree([7], [0], [-1.0], base_length=base + 9),  # of tokens to come
        tree([7], [0], [-1.0], base_length=max(0, base - 1)),  # late
        tree([7], [0], [-1.0], epoch=3),  # of an attachment that was replaced
        tree([], [], []),
        tree([7, 8], [0, 1], [-1.0, -2.0]),
        tree(list(range(60)), list(range(60)), [-float(n) for n in range(60)]),
    ]
