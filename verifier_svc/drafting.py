"""The verifier's dealings with drafters: who has joined, which trees count, how long to wait.

Rules of the contract: only messages of a session's current epoch count; a tree whose base is
behind is re-rooted or dropped; a drafter is awaited for a bounded time, and no more after repeated
misses until a caught-up tree arrives by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.errors import MalformedDraft
from coppice.tree import DraftTree
from protos import verifier_pb2
from verifier_svc.budget import Budget
from verifier_svc.session import DraftLink, Session

MAX_STRIKES = 3
# How fast the running mean of accepted tokens forgets.
_MEAN_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """Reads feature rows of slots as bytes in `dtype`."""

    read: Callable[[Sequence[int]], bytes]
    dtype: str


def join(session: Session, link: DraftLink, epoch: int) -> str:
    """A drafter joins, in the place of the one before; returns why not, if so."""
    draft = session.draft
    if not session.speculation:
        return "the session is to be decoded plainly"
    if epoch < draft.epoch:
        return "a newer attachment stands"
    if draft.link is not None and draft.link is not link:
        send_closed(draft.link, session.session_id, draft.epoch, "another drafter has joined")
    draft.epoch, draft.link = epoch, link
    draft.known, draft.strikes, draft.told_paused = 0, 0, False
    draft.forget_tree()
    return ""


def leave(session: Session) -> None:
    """The drafter is gone; the session goes on plainly at once."""
    session.draft.link = None
    session.draft.lost = True
    session.draft.forget_tree()


def receive_tree(
    session: Session, message: verifier_pb2.Tree, vocab_size: int, now: float, budget: Budget
) -> None:
    """Takes a tree for the next pass, re-roots it if its base is behind, or drops it. `budget`
    learns how long it took.

    Raises MalformedDraft when it breaks the contract.
    """
    draft = session.draft
    tree = DraftTree.checked(message.tokens, message.parents, message.scores, vocab_size)
    tree = tree.trimmed(draft.granted)
    length = len(session.tokens)
    if message.base_length > length:
        raise MalformedDraft(f"base length {message.base_length} is beyond {length}")
    if message.base_length < session.prompt_length:
        raise MalformedDraft(f"base length {message.base_length} lies inside of the prompt")
    if session.pending > 1:  # preempted meanwhile, and recomputing
        session.stats.stale_drafts += 1
        return
    if draft.asked_at is not None and message.base_length == draft.known:
        budget.observe_draft(draft.granted, now - draft.asked_at)
        draft.asked_at = None
    if message.base_length < length:
        rerooted = tree.rerooted(session.tokens[message.base_length :])
        if rerooted is None:
            session.stats.stale_drafts += 1
            return
        tree = rerooted
    draft.tree, draft.draft_id = tree, message.draft_id
    draft.exact = message.base_length == length
    if draft.exact:  # else a better one is on its way, and this one is for when it is late
        draft.awaited_until = None
    # A tree that is empty now does not show that the drafter keeps up.
    draft.benched = draft.benched and not len(tree)
    draft.strikes = max(0, draft.strikes - draft.exact)


def receive_pass(session: Session, base_length: int) -> None:
    """The drafter has nothing to propose this time: nobody waits for it."""
    if base_length == len(session.tokens):
        session.draft.awaited_until = None


def miss(session: Session, now: float, budget: Budget) -> None:
    """A tree was awaited and did not come in time; it takes so long at least."""
    draft = session.draft
    if draft.asked_at is not None:
        budget.observe_draft(draft.granted, now - draft.asked_at)
        draft.asked_at = None
    draft.awaited_until = None
    draft.strikes += 1
    draft.benched = draft.strikes >= MAX_STRIKES
    if draft.benched:
        # One more miss after a comeback is enough.
        draft.strikes = MAX_STRIKES - 1
    session.stats.missed_drafts += 1


def observe(session: Session, accepted: int) -> None:
    """Takes the accepted tokens of a verified tree into the running mean."""
    draft = session.draft
    draft.extra_tokens += _MEAN_WEIGHT * (accepted - draft.extra_tokens)


def tell_committed(
    session: Session, budget: int, accepted: int, plain_step: float, now: float,
    features: FeatureSource,
) -> None:  # fmt: skip
    """After a commit: sends what the next tree needs, or Paused when none is wanted, and sets
    until when that tree is awaited. `plain_step` is the time of a plain step in seconds."""
    draft = session.draft
    if draft.link is None:
        return
    answered = draft.draft_id
    draft.forget_tree()  # it was verified, or came to nothing
    if budget == 0:
        if not draft.told_paused:
            draft.told_paused = True
            paused = verifier_pb2.Paused(session_id=session.session_id, epoch=draft.epoch)
            draft.link.send(verifier_pb2.VerifierItem(paused=paused))
        return
    length = len(session.tokens)
    # Only a drafter that is in play gets features pushed; after a gap it pulls.
    in_play = draft.known > 0 and not draft.told_paused
    features_from = draft.known - 1 if in_play else length - 1
    rows = session.slots[features_from : length - 1] if draft.link.wants_features else []
    committed = verifier_pb2.Committed(
        session_id=session.session_id,
        epoch=draft.epoch,
        start=draft.known,
        base_length=length,
        tokens=session.tokens[draft.known :],
        features_from=features_from,
        features=features.read(rows) if rows else b"",
        feature_dtype=features.dtype,
        draft_id=answered,
        accepted_length=accepted,
        node_budget=budget,
    )
    draft.link.send(verifier_pb2.VerifierItem(committed=committed))
    draft.known, draft.told_paused, draft.granted = length, False, budget
    # After a gap the drafter pulls features first: that time is not the drafting's, and nobody
    # waits for it.
    draft.asked_at = now if in_play else None
    draft.benched = draft.benched or not in_play
    if not draft.benched:
        # Waiting pays at most what the tree is expected to bring (never less than a share of a
        # step, or one bad tree after another would end the waiting for good).
        draft.awaited_until = now + max(0.25, draft.extra_tokens) * plain_step


def tell_closed(session: Session, reason: str) -> None:
    if session.draft.link is not None:
        send_closed(session.draft.link, session.session_id, session.draft.epoch, reason)


def send_closed(link: DraftLink, session_id: str, epoch: int, reason: str) -> None:
    closed = verifier_pb2.Closed(session_id=session_id, epoch=epoch, reason=reason)
    link.send(verifier_pb2.VerifierItem(closed=closed))
