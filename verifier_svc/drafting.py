"""The verifier's dealings with drafters: who has joined, which trees count, how long to wait.

Rules of the contract: only messages of a session's current epoch count; a tree whose base is
behind is re-rooted or dropped; a drafter is awaited for a bounded time, and no more after repeated
misses until a caught-up tree arrives by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.errors import MalformedDraft
from coppice.tree import MAX_ROWS, DraftTree
from protos import verifier_pb2
from verifier_svc.awaiting import Asks, Patience
from verifier_svc.budget import Budget, Grant
from verifier_svc.catching_up import Gap
from verifier_svc.session import DraftLink, Session


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
    draft.known, draft.told_paused = 0, False
    draft.patience, draft.asks = Patience(), Asks()
    draft.forget_tree()
    return ""


def leave(session: Session) -> None:
    """The drafter is gone; the session goes on plainly at once."""
    session.draft.link = None
    session.draft.lost = True
    session.draft.asks.clear()
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
    if session.pending > 1:  # preempted meanwhile: its drafter is not to blame
        return
    drafted = draft.asks.answered(message.base_length, now)
    if drafted is not None:
        budget.observe_draft(*drafted)
    draft.patience.came(in_time=message.base_length == length)
    if message.base_length < length:
        rerooted = tree.rerooted(session.tokens[message.base_length :])
        if rerooted is None:
            session.stats.stale_drafts += 1
            return
        tree = rerooted
    draft.drafted = tree
    if session.stopper.grammar is not None:
        tree = session.stopper.grammar.pruned(tree)
    draft.tree, draft.draft_id = budget.worthwhile(tree), message.draft_id
    draft.exact = message.base_length == length
    if draft.exact:  # else a better one is on its way, and this one is for when it is late
        draft.awaited = None


def receive_pass(session: Session, base_length: int) -> None:
    """The drafter has nothing to propose this time: nobody waits for it."""
    session.draft.asks.answered(base_length, 0.0)
    if base_length == len(session.tokens):
        session.draft.awaited = None


def miss(session: Session, now: float, budget: Budget) -> None:
    """A tree was awaited and did not come in time; it takes so long at least."""
    draft = session.draft
    drafted = draft.asks.overdue(now)
    if drafted is not None:
        budget.observe_draft(*drafted)
    draft.awaited = None
    draft.patience.missed()
    session.stats.missed_drafts += 1


def give_up(session: Session, now: float, budget: Budget) -> None:
    """A pass takes the session without the tree that may be on its way. Only what is overdue was
    missed."""
    awaited = session.draft.awaited
    if awaited is not None and awaited.expected <= now:
        miss(session, now, budget)
    session.draft.asks.disturb()


def pause(session: Session) -> None:
    """No tree is wanted until the next Committed; one that is on its way is nobody's fault."""
    draft = session.draft
    draft.forget_tree()
    if draft.link is not None and not draft.told_paused:
        draft.told_paused = True
        draft.asks.clear()
        paused = verifier_pb2.Paused(session_id=session.session_id, epoch=draft.epoch)
        draft.link.send(verifier_pb2.VerifierItem(paused=paused))


def gap_of(session: Session) -> Gap | None:
    """What the session's drafter has to catch up with before it drafts: all, or what came since it
    was told to pause, or while no trees were wanted. None where it is no more than a tree can
    bring."""
    draft, length = session.draft, len(session.tokens)
    if draft.in_play and length - draft.known <= MAX_ROWS:
        return None
    return Gap(length - draft.known, length - session.prompt_length, session.stopper.left)


def ask(
    session: Session,
    grant: Grant,
    gap: Gap | None,
    accepted: int,
    now: float,
    features: FeatureSource,
) -> verifier_pb2.VerifierItem | None:
    """After a commit: what the next tree needs, to be sent. When none is wanted, nothing, and
    Paused is sent where that is to last."""
    draft = session.draft
    if draft.link is None:
        return None
    answered = draft.draft_id
    draft.forget_tree()  # it was verified, or came to nothing
    if grant.nodes == 0:
        if not grant.once:
            pause(session)
        return None
    length = len(session.tokens)
    # Only a drafter that is in play gets features pushed; after a gap it pulls.
    features_from = draft.known - 1 if draft.in_play else length - 1
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
        node_budget=grant.nodes,
    )
    draft.known, draft.told_paused, draft.granted = length, False, grant.nodes
    draft.asks.add(length, now, grant, caught_up=gap is None)
    if gap is not None:
        draft.patience.bench()
    return verifier_pb2.VerifierItem(committed=committed)


def tell_closed(session: Session, reason: str) -> None:
    if session.draft.link is not None:
        send_closed(session.draft.link, session.session_id, session.draft.epoch, reason)


def send_closed(link: DraftLink, session_id: str, epoch: int, reason: str) -> None:
    closed = verifier_pb2.Closed(session_id=session_id, epoch=epoch, reason=reason)
    link.send(verifier_pb2.VerifierItem(closed=closed))
