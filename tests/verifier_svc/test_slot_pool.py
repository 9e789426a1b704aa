"""The slots' owners, against a slow trie of single tokens and what each slot was written with."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.slot_pool import PageTable, SlotPool

CAPACITY = 24
Prefix = tuple[int, ...]


@dataclass
class Cached:
    readers: int
    released: int = 0  # when the last reader went


class SlowPool:
    """One entry for each prefix that is kept, whatever nodes the tree makes of it."""

    def __init__(self) -> None:
        self.cached: dict[Prefix, Cached] = {}
        self.own = 0
        self.clock = 0

    @property
    def free(self) -> int:
        return CAPACITY - self.own - len(self.cached)

    @property
    def idle(self) -> list[Prefix]:
        return [prefix for prefix, entry in self.cached.items() if not entry.readers]

    def longest(self, tokens: list[int], stop: int) -> int:
        return max(n for n in range(stop + 1) if n == 0 or tuple(tokens[:n]) in self.cached)

    def read(self, tokens: list[int], start: int, stop: int) -> None:
        for end in range(start + 1, stop + 1):
            self.cached.setdefault(tuple(tokens[:end]), Cached(0)).readers += 1

    def unread(self, tokens: list[int], stop: int) -> None:
        self.clock += 1
        for end in range(1, stop + 1):
            entry = self.cached[tuple(tokens[:end])]
            entry.readers -= 1
            entry.released = self.clock

    def evict(self, count: int) -> None:
        """The leaf that nobody reads and that was released before all others, one by one."""
        for _ in range(count):
            inner = {prefix[:-1] for prefix in self.cached}
            leaves = [prefix for prefix in self.idle if prefix not in inner]
            del self.cached[min(leaves, key=lambda prefix: self.cached[prefix].released)]


class Trace:
    """Sequences that come, compute, share and leave at random, in both pools."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool = SlotPool(CAPACITY)
        self.slow = SlowPool()
        self.sequences: list[tuple[list[int], PageTable]] = []
        self.written: dict[int, Prefix | None] = {}  # the prefix whose KV lies in a slot

    def step(self) -> None:
        if not self.sequences or (len(self.sequences) < 4 and self.rng.random() < 0.3):
            self.start([self.rng.randrange(2) for _ in range(self.rng.randint(1, 10))])
            return
        sequence = self.rng.choice(self.sequences)
        action = self.rng.choice([self.match, self.compute, self.compute, self.share, self.leave])
        action(*sequence)

    def start(self, tokens: list[int]) -> None:
        read = [prefix for prefix, entry in self.slow.cached.items() if entry.readers]
        shared = [n for n in range(len(tokens)) if n == 0 or tuple(tokens[:n]) in read]
        assert self.pool.price(tokens) == len(tokens) - max(shared)
        table = PageTable()
        self.match(tokens, table)
        self.sequences.append((tokens, table))

    def match(self, tokens: list[int], table: PageTable) -> None:
        start, has_own = table.shared, bool(table.own)
        wanted = start if has_own else max(start, self.slow.longest(tokens, len(tokens) - 1))
        assert start + self.pool.match(table, tokens) == wanted
        self.slow.read(tokens, start, wanted)

    def compute(self, tokens: list[int], table: PageTable) -> None:
        if len(table.slots) == len(tokens):  # an answer goes on
            tokens.append(self.rng.randrange(2))
        count = self.rng.randint(1, len(tokens) - len(table.slots))
        wanted = count + self.rng.randint(0, 3)  # and drafts that come to nothing
        taken = self.pool.allocate(wanted)
        assert (taken is None) == (wanted > self.slow.free + len(self.slow.idle))
        if taken is None:
            return
        self.slow.evict(max(0, wanted - self.slow.free))
        self.written.update(dict.fromkeys(taken))
        self.pool.release(taken[count:])
        for slot in taken[:count]:
            table.slots.append(slot)
            self.written[slot] = tuple(tokens[: len(table.slots)])
        self.slow.own += count

    def share(self, tokens: list[int], table: PageTable) -> None:
        self.slow.own -= len(table.own)
        self.slow.read(tokens, table.shared, len(table.slots))
        self.pool.share(table, tokens)

    def leave(self, tokens: list[int], table: PageTable) -> None:
        self.sequences = [kept for kept in self.sequences if kept[1] is not table]
        if self.rng.random() < 0.8:
            self.slow.own -= len(table.own)
            self.slow.read(tokens, table.shared, len(table.slots))
            self.slow.unread(tokens, len(table.slots))
            self.pool.give_up(table, tokens)
        else:
            self.slow.own -= len(table.own)
            self.slow.unread(tokens, table.shared)
            self.pool.discard(table)
        assert table == PageTable()

    def check(self) -> None:
        self.pool.check_integrity([table for _, table in self.sequences])
        for tokens, table in self.sequences:
            believed = [tuple(tokens[: end + 1]) for end in range(len(table.slots))]
            assert [self.written[slot] for slot in table.slots] == believed
        assert self.pool.free == self.slow.free
        assert self.pool.cached == len(self.slow.idle)
        assert self.pool.used == CAPACITY - self.slow.free - len(self.slow.idle)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_slots_are_shared_and_evicted_as_in_the_slow_pool(seed: int) -> None:
    trace = Trace(random.Random(seed))
    for _ in range(80):
        trace.step()
        trace.check()


def filled(pool: SlotPool, tokens: list[int]) -> PageTable:
    table = PageTable()
    pool.match(table, tokens)
    table.slots.extend(pool.allocate(len(tokens) - len(table.slots)) or [])
    return table


def test_without_caching_nothing_is_kept() -> None:
    pool = SlotPool(8, caching=False)
    table = filled(pool, [1, 2, 3])
    pool.share(table, [1, 2, 3])
    pool.give_up(table, [1, 2, 3])
    assert (pool.free, pool.cached) == (8, 0)


def test_two_owners_of_a_slot_are_noticed() -> None:
    pool = SlotPool(8)
    table = filled(pool, [1, 2, 3])
    pool.share(table, [1, 2, 3])
    table.shared -= 1  # as if the last one were its own
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([table])


def test_a_lock_without_a_reader_is_noticed() -> None:
    pool = SlotPool(8)
    table = filled(pool, [1, 2, 3])
    pool.share(table, [1, 2, 3])
    with pytest.raises(AssertionError, match="a lock without a reader"):
        pool.check_integrity([])


def test_a_long_match_costs_a_few_list_operations() -> None:
    """100,000 tokens in nodes of 100: far below what a copy of the rest per node would take."""
    tokens = list(range(100_000))
    pool = SlotPool(len(tokens))
    writer = PageTable()
    for start in range(0, len(tokens), 100):
        writer.slots.extend(pool.allocate(100) or [])
        assert len(writer.slots) == start + 100
        pool.share(writer, tokens)
    reader = CountingList(tokens)
    table = PageTable()
    assert pool.match(table, reader) == len(tokens) - 1
    assert table.slots == writer.slots[:-1]
    assert reader.read < 3 * len(tokens)


class CountingList(list[int]):
    """Counts the tokens that are looked at."""

    read = 0

    def __getitem__(self, key):  # type: ignore[override]
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found
