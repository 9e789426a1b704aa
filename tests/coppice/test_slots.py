"""Slot accounting: nothing is lost, nothing has two owners."""

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import data, integers

from coppice.slots import SlotAllocator


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(20)
        self.owners: list[list[int]] = []

    @rule(count=integers(0, 25))
    def allocate(self, count: int) -> None:
        left = 20 - sum(map(len, self.owners))
        taken = self.slots.allocate(count)
        assert (taken is None) == (count > left)
        if taken is not None:
            assert len(taken) == count
            self.owners.append(taken)

    @rule(choice=data())
    def release_some(self, choice) -> None:
        if self.owners:
            owner = self.owners[choice.draw(integers(0, len(self.owners) - 1))]
            keep = choice.draw(integers(0, len(owner)))
            self.slots.release(owner[keep:])
            del owner[keep:]

    @invariant()
    def every_slot_is_free_or_owned_once(self) -> None:
        self.slots.check_integrity(self.owners)
        assert self.slots.used == sum(map(len, self.owners))


def test_slots_are_conserved_over_any_history() -> None:
    run_state_machine_as_test(Slots)


def test_releasing_a_free_slot_is_refused() -> None:
    slots = SlotAllocator(4)
    taken = slots.allocate(2)
    assert taken is not None
    slots.release(taken)
    with pytest.raises(ValueError, match="released twice"):
        slots.release(taken)


def test_integrity_notices_a_leak_and_a_double_owner() -> None:
    slots = SlotAllocator(4)
    taken = slots.allocate(2)
    assert taken is not None
    with pytest.raises(AssertionError, match="2 slots used, 1 owned"):
        slots.check_integrity([taken[:1]])
    with pytest.raises(AssertionError, match="two owners"):
        slots.check_integrity([taken, taken[:1]])
