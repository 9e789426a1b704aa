"""Which sessions' draft KV is kept, in which slots, and who has to leave for whom.

The pair of token x_{t+1} and feature f_t sits at position t, so a session whose first n tokens
have been seen owns n - 1 slots.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.slots import SlotAllocator


@dataclass(slots=True, eq=False)
class CachedSession:
    """Only committed positions are kept; `slots[t]` holds the pair of position t."""

    tokens: list[int]
    slots: Tensor  # [len(tokens) - 1] int64
    root_feature: Tensor | None  # [hidden], predicted at the last slot; None after a roll-back


class DraftCache:
    """Least-recently-used bookkeeping of a bounded pool of slots."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._allocator = SlotAllocator(capacity)
        self._device = device
        self._sessions: OrderedDict[str, CachedSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        """See `Drafter.features_needed`."""
        last = max(len(tokens) - 1, 0)
        # For what can never have room, no feature helps.
        return last if last > self._allocator.capacity else self._kept(session_id, tokens)

    def extend(
        self, session_id: str, tokens: Sequence[int], scratch: int, busy: Collection[str]
    ) -> tuple[CachedSession, Tensor] | None:
        """The session with a slot for each pair of `tokens`, and `scratch` [scratch] further
        slots to be handed to `release`. Sessions out of `busy` are evicted, the least recently
        used first. None if there is no room even then; what the session had is freed, or several
        that are half there would block each other."""
        kept = self._kept(session_id, tokens)
        self._roll_back(session_id, kept)
        taken = self._allocate(len(tokens) - 1 - kept + scratch, {session_id, *busy})
        if taken is None:
            self.forget(session_id)
            return None
        fresh = torch.tensor(taken, dtype=torch.int64, device=self._device)
        session = self._sessions.get(session_id)
        if session is None:
            empty = torch.empty(0, dtype=torch.int64, device=self._device)
            session = self._sessions[session_id] = CachedSession([], empty, None)
        self._sessions.move_to_end(session_id)
        session.tokens = list(tokens)
        session.slots = torch.cat((session.slots, fresh[: len(taken) - scratch]))
        return session, fresh[len(taken) - scratch :]

    def release(self, scratch: Tensor) -> None:
        self._allocator.release(scratch.tolist())

    def forget(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._allocator.release(session.slots.tolist())

    def check_integrity(self) -> None:
        """Raises AssertionError unless every used slot is owned by exactly one session. Scratch
        slots are owned by nobody, so none may be out."""
        owners: list[list[int]] = [session.slots.tolist() for session in self._sessions.values()]
        self._allocator.check_integrity(owners)
        for session in self._sessions.values():
            assert len(session.slots) == max(len(session.tokens) - 1, 0), "slots and tokens differ"

    def _kept(self, session_id: str, tokens: Sequence[int]) -> int:
        """How many pairs of the session are those of `tokens`, and can stay."""
        session = self._sessions.get(session_id)
        if session is None:
            return 0
        common = _common_length(session.tokens, tokens)
        if common == len(tokens) and not _ends_at(session, common):
            # The root's own pair is there, but what was predicted from it is not.
            return max(common - 2, 0)
        return max(common - 1, 0)

    def _roll_back(self, session_id: str, pairs: int) -> None:
        session = self._sessions.get(session_id)
        if session is None or len(session.slots) == pairs:
            return
        if pairs == 0:
            self.forget(session_id)
            return
        self._allocator.release(session.slots[pairs:].tolist())
        session.slots = session.slots[:pairs]
        session.tokens = session.tokens[: pairs + 1]
        session.root_feature = None

    def _allocate(self, count: int, busy: Collection[str]) -> list[int] | None:
        idle = [name for name in self._sessions if name not in busy]
        evictable = sum(len(self._sessions[name].slots) for name in idle)
        if count > self._allocator.free + evictable:
            return None
        for name in idle:
            if count <= self._allocator.free:
                break
            self.forget(name)
        return self._allocator.allocate(count)


def _ends_at(session: CachedSession, length: int) -> bool:
    return len(session.tokens) == length and session.root_feature is not None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    return next(index for index in range(shorter) if a[index] != b[index])
