"""Which verifier has seen which beginning of a text, as far as this gateway sent it there."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

BLOCK_TOKENS = 32
CAPACITY_BLOCKS = 1 << 17


class PrefixMemory:
    """A guess at the verifiers' prefix trees that costs no message: a block is known by the hash
    of all tokens up to its end. Where it is wrong (evicted there, sent by another gateway, two
    hashes equal), a prompt is computed again and nothing else happens; so verifiers need not
    report what they hold. The least recently used blocks are forgotten."""

    def __init__(self, capacity: int = CAPACITY_BLOCKS) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int, str], None] = OrderedDict()

    def remember(self, address: str, tokens: Sequence[int]) -> None:
        """These tokens were computed at the verifier of this address, which a restarted one,
        being empty, does not keep."""
        for block in _blocks(tokens):
            self._blocks[block, address] = None
            self._blocks.move_to_end((block, address))
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def longest(self, addresses: Iterable[str], tokens: Sequence[int]) -> set[str]:
        """The addresses that share the longest known beginning of `tokens`; empty: none does."""
        holders: set[str] = set()
        remaining = set(addresses)
        for block in _blocks(tokens):
            remaining = {address for address in remaining if (block, address) in self._blocks}
            if not remaining:
                break
            holders = remaining
        return holders


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """The hashes of all whole blocks, each of which covers those before it."""
    chain = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        chain = hash((chain, tuple(tokens[end - BLOCK_TOKENS : end])))
        yield chain
