"""What the next forward pass does: a pure function of the sessions' state.

A pass mixes prefill chunks, single tokens and trees. Admission is first come first served by
available slots, so nobody starves, and who runs has come before all who wait. Prompts are read in
order of arrival, in chunks that leave those who decode their pace. When slots run out drafts are
dropped first, then the youngest session is preempted (its tokens stay, its slots are recomputed
later). Available slots are those that are free and those that the prefix tree can give back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionView:
    """The part of a running session's state that scheduling depends on."""

    session_id: str
    pending: int  # tokens without KV, at least 1 (the root)
    nodes: int = 0  # of the tree that has arrived
    awaited_until: float | None = None  # a tree is still expected, until then
    context: int = 0  # tokens with KV


@dataclass(frozen=True, slots=True)
class Limits:
    prefill_chunk: int  # prompt tokens of one pass
    # The same, while others decode with so many rows: for each of the prompts that get any.
    prefill_beside: Callable[[int, Sequence[SessionView]], Sequence[int]]
    row_budget: int  # tree rows of one pass
    headroom: int  # slots that an admission leaves for the first steps


@dataclass(frozen=True, slots=True)
class Share:
    """What one session does in a pass: `rows` tokens of prefill, or its root and `nodes`."""

    session_id: str
    rows: int = 1
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A pass to run, or a session to preempt before there can be one; with neither there is
    nothing to do until `wait_until` (None: until a message)."""

    shares: tuple[Share, ...] = ()
    preempted: str | None = None
    wait_until: float | None = None


def admits(price: int, available: int, running: Sequence[int], limits: Limits) -> bool:
    """Whether the first of those who wait can start, for `price` of the available slots.
    `running` are the pending tokens of those who have started: what their prompts still lack is
    spoken for. Alone in the pool every session fits."""
    return not running or price + limits.headroom <= available - sum(running)


def plan(views: Sequence[SessionView], available: int, limits: Limits) -> Plan:
    """The next pass for running sessions in order of arrival."""
    prefilling = [view for view in views if view.pending > 1]
    decoding = [view for view in views if view.pending == 1]
    beside = _decode_shares(decoding, limits)
    until = [view.awaited_until for view in decoding if view.awaited_until is not None]
    if until:
        # Whoever decodes plainly, or reads its prompt, does not wait for the drafts of others,
        # unless they are more: a pass costs those who miss it as much as those who are in it. Trees
        # that are there wait, until the first time that is over.
        ready = [view for view in decoding if view.awaited_until is None]
        if not prefilling and (len(ready) < len(until) or all(view.nodes for view in ready)):
            return Plan(wait_until=min(until))
        decoding = ready
    shares = _decode_shares(decoding, limits)
    if beside:
        rows = sum(share.rows + share.nodes for share in beside)
        parts = limits.prefill_beside(rows, prefilling)
        shares += [Share(v.session_id, part) for v, part in zip(prefilling, parts, strict=False)]
    else:
        shares += _prefill_shares(prefilling, limits.prefill_chunk)
    return _fit(views, shares, available)


def _decode_shares(decoding: Sequence[SessionView], limits: Limits) -> list[Share]:
    cap = limits.row_budget // max(1, len(decoding)) - 1
    return [Share(view.session_id, 1, max(0, min(view.nodes, cap))) for view in decoding]


def _prefill_shares(prefilling: Sequence[SessionView], chunk: int) -> list[Share]:
    shares: list[Share] = []
    left = chunk
    for view in prefilling:
        rows = min(left, view.pending)
        if rows:
            shares.append(Share(view.session_id, rows))
            left -= rows
    return shares


def _fit(views: Sequence[SessionView], shares: list[Share], available: int) -> Plan:
    """Drops drafts, then asks for the youngest session's slots, until the pass fits. What a
    session gives back depends on whom it shares with, so it is planned anew without it."""
    if sum(share.rows + share.nodes for share in shares) > available:
        shares = [Share(share.session_id, share.rows) for share in shares]
    if sum(share.rows for share in shares) > available and len(views) > 1:
        return Plan(preempted=views[-1].session_id)
    return Plan(tuple(shares))
