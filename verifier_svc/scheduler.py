"""What the next forward pass does: a pure function of the sessions' state.

Sessions come in order of arrival. A pass mixes prefill chunks, single tokens and trees; admission
is first come first served by free slots; when slots run out drafts are dropped first, then the
youngest session is preempted (its tokens stay, its slots are recomputed later).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    prefill_chunk: int  # prompt tokens of one pass
    row_budget: int  # tree rows of one pass
    headroom: int  # slots that an admission leaves for the first steps


@dataclass(frozen=True, slots=True)
class SessionView:
    """The part of a session's state that scheduling depends on."""

    session_id: str
    waiting: bool  # not admitted yet, or preempted
    pending: int  # tokens without KV, at least 1 (the root)
    held: int  # slots owned
    nodes: int = 0  # of the tree that has arrived
    awaited_until: float | None = None  # a tree is still expected, until then


@dataclass(frozen=True, slots=True)
class Share:
    """What one session does in a pass: `rows` tokens of prefill, or its root and `nodes`."""

    session_id: str
    rows: int = 1
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A pass to run; with no shares: nothing to do until `wait_until` (None: until a message)."""

    shares: tuple[Share, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    wait_until: float | None = None


def plan(views: Sequence[SessionView], free: int, limits: Limits) -> Plan:
    """The next pass for sessions in order of arrival and `free` slots."""
    admitted = _admit(views, free, limits)
    active = [view for view in views if not view.waiting or view.session_id in admitted]
    prefilling = [view for view in active if view.pending > 1]
    decoding = [view for view in active if view.pending == 1]
    until = [view.awaited_until for view in decoding if view.awaited_until is not None]
    if until:
        # Whoever decodes plainly, or reads its prompt, does not wait for the drafts of others;
        # trees that are there do, until the first time that is over.
        ready = [view for view in decoding if view.awaited_until is None]
        if not prefilling and all(view.nodes for view in ready):
            return Plan(wait_until=min(until))
        decoding = ready
    shares = [*_decode_shares(decoding, limits), *_prefill_shares(prefilling, limits)]
    return _fit(active, shares, free, admitted)


def _admit(views: Sequence[SessionView], free: int, limits: Limits) -> tuple[str, ...]:
    admitted: list[str] = []
    # What running prompts have still to write is spoken for.
    free -= sum(view.pending for view in views if not view.waiting)
    for view in views:
        if not view.waiting:
            continue
        free -= view.pending + limits.headroom
        if free < 0 and (admitted or any(not other.waiting for other in views)):
            break
        admitted.append(view.session_id)
    return tuple(admitted)


def _decode_shares(decoding: Sequence[SessionView], limits: Limits) -> list[Share]:
    cap = limits.row_budget // max(1, len(decoding)) - 1
    return [Share(view.session_id, 1, max(0, min(view.nodes, cap))) for view in decoding]


def _prefill_shares(prefilling: Sequence[SessionView], limits: Limits) -> list[Share]:
    shares: list[Share] = []
    left = limits.prefill_chunk
    for view in prefilling:
        rows = min(left, view.pending)
        if rows:
            shares.append(Share(view.session_id, rows))
            left -= rows
    return shares


def _fit(
    active: Sequence[SessionView], shares: list[Share], free: int, admitted: tuple[str, ...]
) -> Plan:
    """Drops drafts, then preempts the youngest, until the slots suffice."""
    if sum(share.rows + share.nodes for share in shares) > free:
        shares = [Share(share.session_id, share.rows) for share in shares]
    preempted: list[str] = []
    remaining = list(active)
    while sum(share.rows for share in shares) > free and len(remaining) > 1:
        youngest = remaining.pop()
        free += youngest.held
        shares = [share for share in shares if share.session_id != youngest.session_id]
        preempted.append(youngest.session_id)
    kept = tuple(name for name in admitted if name not in preempted)
    gone = tuple(name for name in preempted if name not in admitted)
    return Plan(tuple(shares), kept, gone)
