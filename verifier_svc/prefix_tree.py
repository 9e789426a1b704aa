"""A radix tree over tokens whose nodes own the KV slots of prefixes that have been computed.

Whoever reads a node's slots locks it, and so all nodes above it. What nobody has locked is
evictable: the tail of the leaf that was least recently used goes first. Slots change their owner,
and nothing is copied. Features lie in the same slots. (RadixAttention: Zheng et al. 2024, SGLang,
section 3.)
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of `parent` (None: the root, which has none), a slot for each."""

    tokens: list[int]
    slots: list[int]
    parent: "Node | None"
    children: "dict[int, Node]" = field(default_factory=dict[int, "Node"])  # by first token
    locks: int = 0  # readers of this node or of one below


class PrefixTree:
    """Pure bookkeeping. A walk costs as much as the tokens that it matches."""

    def __init__(self) -> None:
        self.root = Node([], [], None)
        self.evictable = 0  # slots
        # Nodes without locks, least recently used first. A child is unlocked no later than its
        # parent and stands before it, so the first one is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    def match(
        self, node: Node, tokens: Sequence[int], start: int, stop: int
    ) -> tuple[Node, list[int]]:
        """The longest prefix of tokens[start:stop] below `node`, which ends at tokens[:start] and
        is the root or locked by the caller: where it ends, and its slots. The caller's lock moves
        down there. A node that matches in part is split."""
        slots: list[int] = []
        while start < stop:
            child = node.children.get(tokens[start])
            if child is None:
                break
            length = _common(child.tokens, tokens, start, stop)
            if length < len(child.tokens):
                child = self._split(child, length)
            self._lock(child)
            slots.extend(child.slots)
            start += length
            node = child
        return node, slots

    def append(self, node: Node, tokens: Sequence[int], slots: Sequence[int]) -> Node:
        """A new node below `node`, where nothing begins with tokens[0] yet: the tree owns `slots`
        from now on. The caller's lock moves down there."""
        child = Node(list(tokens), list(slots), node, locks=1)
        node.children[tokens[0]] = child
        return child

    def unlock(self, node: Node) -> None:
        """A reader of `node` has gone."""
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self.evictable += len(node.slots)
                self._idle[node] = None
            node = node.parent

    def locked_length(self, tokens: Sequence[int], stop: int) -> int:
        """How long a prefix of tokens[:stop] is locked by somebody already."""
        node, start = self.root, 0
        while start < stop:
            child = node.children.get(tokens[start])
            if child is None or not child.locks:
                break
            length = _common(child.tokens, tokens, start, stop)
            start += length
            if length < len(child.tokens):
                break
            node = child
        return start

    def evict(self, count: int) -> list[int]:
        """Up to `count` slots that nobody reads, from the ends of the least recently used leaves.
        They are the caller's."""
        freed: list[int] = []
        while len(freed) < count and self._idle:
            node = next(iter(self._idle))
            keep = max(0, len(node.slots) - (count - len(freed)))
            freed.extend(node.slots[keep:])
            if not keep:
                del self._idle[node]
                assert node.parent is not None and not node.children
                del node.parent.children[node.tokens[0]]
            del node.tokens[keep:], node.slots[keep:]
        self.evictable -= len(freed)
        return freed

    def owners(self) -> Iterator[list[int]]:
        """The slots of every node."""
        return (node.slots for node in self._nodes())

    def check_integrity(self, readers: Iterable[Node]) -> None:
        """Raises AssertionError unless the tree is well formed and locked by `readers` alone."""
        locks: dict[Node, int] = {}
        for reader in readers:
            node: Node | None = reader
            while node is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        place = {node: index for index, node in enumerate(self._idle)}
        idle = 0
        for node in self._nodes():
            parent = node.parent
            assert parent is not None and parent.children[node.tokens[0]] is node, "a lost node"
            assert len(node.tokens) == len(node.slots) > 0, "a node's tokens and slots differ"
            assert node.locks == locks.pop(node, 0), "a lock without a reader"
            assert (node.locks == 0) == (node in place), "the idle nodes are not those unlocked"
            if node in place:
                idle += len(node.slots)
                assert place[node] < place.get(parent, len(place)), "a parent before its child"
        assert idle == self.evictable, f"{idle} slots are evictable, {self.evictable} counted"
        assert locks.keys() <= {self.root}, "a reader of a node that is gone"

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _lock(self, node: Node) -> None:
        if not node.locks:
            self.evictable -= len(node.slots)
            del self._idle[node]
        node.locks += 1

    def _split(self, node: Node, length: int) -> Node:
        """Puts the first `length` tokens into a node of their own above; returns that one. Whoever
        reads `node` reads both."""
        assert node.parent is not None
        upper = Node(node.tokens[:length], node.slots[:length], node.parent, locks=node.locks)
        upper.children[node.tokens[length]] = node
        node.parent.children[node.tokens[0]] = upper
        node.parent = upper
        del node.tokens[:length], node.slots[:length]
        if not node.locks:
            self._idle[upper] = None  # behind its child; whoever splits is about to lock it
        return upper


def _common(edge: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> int:
    """How many tokens of `edge` are the first of tokens[start:stop]."""
    most = min(len(edge), stop - start)
    if edge[:most] == tokens[start : start + most]:  # the usual case, in one comparison
        return most
    return next(index for index in range(most) if edge[index] != tokens[start + index])
