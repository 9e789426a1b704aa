"""What comes before a pass: sessions are admitted, prefixes matched, and if need be sessions are
preempted. Policy and bookkeeping alone: no tensors, no clock."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from verifier_svc import scheduler
from verifier_svc.scheduler import Limits, SessionView, Share
from verifier_svc.session import Session
from verifier_svc.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The pass that is to be run now, if any, and what was done for it."""

    shares: tuple[Share, ...]
    wait_until: float | None  # without shares: there is nothing to do until then
    preempted: tuple[Session, ...]
    matched: int  # tokens whose prefill was spared


def plan_pass(
    sessions: Collection[Session], slots: SlotPool, limits: Limits, now: float
) -> PassPlan:
    """Plans for sessions in order of arrival; the slots for the planned shares are available."""
    running = [session for session in sessions if not session.waiting]
    waiting = [session for session in sessions if session.waiting and not session.paused]
    # What another one with the same prompt has computed meanwhile is there for all.
    matched = sum(slots.match(s.table, s.tokens) for s in running if s.pending > 1)
    matched += _admit([session.pending for session in running], waiting, slots, limits)
    # A session that goes on after a pause may be older than some that run.
    running = [session for session in sessions if not session.waiting]
    preempted: list[Session] = []
    while True:
        views = [_view(session) for session in running]
        planned = scheduler.plan(views, slots.available, limits, now)
        if planned.preempted is None:
            break
        youngest = running.pop()
        slots.give_up(youngest.table, youngest.tokens)
        youngest.waiting = True
        preempted.append(youngest)
    return PassPlan(planned.shares, planned.wait_until, tuple(preempted), matched)


def _admit(pending: list[int], waiting: Iterable[Session], slots: SlotPool, limits: Limits) -> int:
    """Starts those of `waiting` who can, beside running ones with so many `pending` tokens; returns
    the tokens matched."""
    matched = 0
    for session in waiting:
        price = slots.price(session.tokens)
        if not scheduler.admits(price, slots.available, pending, limits):
            break
        session.waiting = False
        matched += slots.match(session.table, session.tokens)
        pending.append(session.pending)
    return matched


def _view(session: Session) -> SessionView:
    tree = session.draft.tree
    return SessionView(
        session.session_id,
        session.pending,
        len(tree) if tree is not None else 0,
        session.draft.awaited,
        session.draft.gain,
        len(session.slots),
    )
