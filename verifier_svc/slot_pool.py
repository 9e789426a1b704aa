"""Who owns which token slot: a sequence, the prefix tree, or nobody.

A prompt's slots go to the tree as soon as they are computed, so that whoever has the same prefix
shares them at once; those of the answer when the sequence gives up its place (it has ended, or is
preempted). Only committed tokens get there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coppice.slots import SlotAllocator
from verifier_svc.prefix_tree import Node, PrefixTree


@dataclass(slots=True)
class PageTable:
    """A sequence's slots in order of position. The first `shared` belong to the nodes of the
    prefix tree down to `node`, which are locked for the sequence; the others are its own."""

    slots: list[int] = field(default_factory=list[int])
    shared: int = 0
    node: Node | None = None  # None: the root

    @property
    def own(self) -> list[int]:
        return self.slots[self.shared :]


class SlotPool:
    """Pure bookkeeping of `capacity` slots. Without `caching` the tree stays empty."""

    def __init__(self, capacity: int, caching: bool = True) -> None:
        self._allocator = SlotAllocator(capacity)
        self._tree = PrefixTree()
        self._caching = caching

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Slots that the tree keeps for nobody in particular."""
        return self._tree.evictable

    @property
    def used(self) -> int:
        """Slots that sequences read, their own or shared ones."""
        return self.capacity - self.available

    @property
    def available(self) -> int:
        """Slots that can be had without taking any from a sequence."""
        return self.free + self.cached

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, for which prefixes are evicted if need be; None (and nothing taken) when
        so many are not available."""
        if count > self.available:
            return None
        self._allocator.release(self._tree.evict(count - self.free))
        return self._allocator.allocate(count)

    def release(self, slots: Iterable[int]) -> None:
        self._allocator.release(slots)

    def price(self, tokens: Sequence[int]) -> int:
        """Of the available slots, how many a new sequence of these tokens takes: all that it does
        not share with those that are running."""
        return len(tokens) - self._tree.locked_length(tokens, len(tokens) - 1)

    def match(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Goes on with what the tree holds of `tokens` after the table's; returns how many. One
        token is left in any case, for the logits."""
        if table.shared < len(table.slots):
            return 0
        node, found = self._tree.match(
            table.node or self._tree.root, tokens, table.shared, len(tokens) - 1
        )
        table.slots.extend(found)
        table.shared, table.node = len(table.slots), node
        return len(found)

    def share(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Gives the sequence's own slots to the tree and shares them. Where somebody was faster,
        the sequence takes over the tree's, and its own are free."""
        if not self._caching:
            return
        own, end = table.own, len(table.slots)
        node, found = self._tree.match(table.node or self._tree.root, tokens, table.shared, end)
        start = table.shared + len(found)
        table.slots[table.shared : start] = found
        self._allocator.release(own[: len(found)])
        if start < end:
            node = self._tree.append(node, tokens[start:end], own[len(found) :])
        table.shared, table.node = end, node

    def give_up(self, table: PageTable, tokens: Sequence[int]) -> None:
        """The sequence leaves its place; what it has computed stays until it is evicted."""
        self.share(table, tokens)
        self.discard(table)

    def discard(self, table: PageTable) -> None:
        """The sequence leaves its place, and its own slots are free."""
        self._allocator.release(table.own)
        if table.node is not None:
            self._tree.unlock(table.node)
        table.slots.clear()
        table.shared, table.node = 0, None

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """Raises AssertionError unless every slot is free, or owned by exactly one of the
        sequences with these tables or by exactly one node of the tree."""
        self._allocator.check_integrity([*(table.own for table in tables), *self._tree.owners()])
        self._tree.check_integrity(table.node for table in tables if table.node is not None)
        for table in tables:
            assert table.slots[: table.shared] == _path(table.node), "shares what is not locked"


def _path(node: Node | None) -> list[int]:
    """The slots from the root down to `node`."""
    parts: list[list[int]] = []
    while node is not None:
        parts.append(node.slots)
        node = node.parent
    return [slot for part in reversed(parts) for slot in part]
