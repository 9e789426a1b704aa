"""Accounting of token slots: every slot is free or owned by exactly one sequence."""

from collections.abc import Iterable, Sequence


class SlotAllocator:
    """Hands out slot numbers in [0, capacity). Pure bookkeeping, no tensors."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._is_free = [True] * capacity

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, or None (and nothing taken) when so many are not free."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        for slot in taken:
            self._is_free[slot] = False
        return taken

    def release(self, slots: Iterable[int]) -> None:
        """Gives slots back. Raises ValueError for a slot that is already free."""
        for slot in slots:
            if self._is_free[slot]:
                raise ValueError(f"slot {slot} released twice")
            self._is_free[slot] = True
            self._free.append(slot)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `owners` hold exactly the used slots, each once."""
        owned = [slot for slots in owners for slot in slots]
        if len(set(owned)) != len(owned):
            raise AssertionError("a slot has two owners")
        if {slot for slot in range(self.capacity) if not self._is_free[slot]} != set(owned):
            raise AssertionError(f"{self.used} slots used, {len(owned)} owned")
        if len(set(self._free)) != len(self._free) or sum(self._is_free) != len(self._free):
            raise AssertionError("the free list disagrees with the free flags")
