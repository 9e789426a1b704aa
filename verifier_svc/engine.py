"""The loop that owns all sessions: messages in, one forward pass, commits out.

Everything but `post` runs on the engine's own thread, so nothing here is locked.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coppice.errors import (
    CoppiceError,
    FailedPrecondition,
    InvalidArgument,
    MalformedDraft,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from coppice.models.placement import dtype_name
from coppice.settings import Settings
from coppice.tree import MAX_ROWS
from protos import verifier_pb2
from verifier_svc import drafting, stepping
from verifier_svc.budget import Budget, Grant
from verifier_svc.guard import Guard
from verifier_svc.inbox import Inbox
from verifier_svc.metrics import Timings, VerifierMetrics
from verifier_svc.pacing import PrefillPace
from verifier_svc.planning import PassPlan, plan_pass
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Limits
from verifier_svc.session import DraftLink, Session, StepEvent
from verifier_svc.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class Running:
    """The sessions that are not waiting."""

    decoding: int
    reading: int  # tokens of others' prompts in a pass, about


@dataclass(slots=True)
class Engine:
    runner: Runner
    settings: Settings
    metrics: VerifierMetrics
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])
    draining: bool = False
    timings: Timings = field(default_factory=Timings)

    slots: SlotPool = field(init=False)
    guard: Guard = field(init=False)
    budget: Budget = field(init=False)
    pace: PrefillPace = field(init=False)
    _features: drafting.FeatureSource = field(init=False)
    _inbox: Inbox = field(default_factory=Inbox)
    _stopping: bool = False

    def __post_init__(self) -> None:
        verifier = self.settings.verifier
        self.slots = SlotPool(self.runner.slots, verifier.prefix_cache)
        speculation = self.settings.speculation
        self.budget = Budget(speculation.nodes, verifier.row_budget, speculation.budget == "auto")
        # Asked for when it is read, not at every pass.
        self.metrics.calibration_error.set_function(lambda: self.budget.calibration.error)
        self.guard = Guard(self.settings.guard, speculation.drafter, self.budget.advantage)
        self.pace = PrefillPace(verifier.prefill_chunk, self.budget.step_seconds)
        dtype = dtype_name(self.runner.model.dtype)
        self._features = drafting.FeatureSource(self.runner.read_features, dtype)

    # ---- from any thread ---------------------------------------------------

    def post(self, message: Callable[[], None]) -> None:
        """Runs `message` on the engine's thread before the next pass."""
        self._inbox.post(message)

    def stop(self) -> None:
        def set_stopping() -> None:
            self._stopping = True

        self.post(set_stopping)

    # ---- the loop ----------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`. Whatever ends it, every session is told."""
        try:
            while not self._stopping:
                self.step()
        finally:
            for session in list(self.sessions.values()):
                self.close(session, Unavailable("the verifier stopped; try again"))

    def step(self, block: bool = True) -> bool:
        """Takes all messages, then runs one pass, or waits for what a pass still needs.

        Returns whether a pass was run. With `block` false it never waits.
        """
        self._inbox.take()
        if self._stopping:
            return False
        now = time.monotonic()
        depth = sum(not session.paused for session in self.sessions.values())
        closed = self.guard.update(depth, now)
        self._drop_late_drafts(now, closed)
        planned = self._plan(now)
        if planned.shares:
            self.timings.plan += time.monotonic() - now
            stepping.run_pass(self, planned.shares)
        self.metrics.observe_state(self)
        if not self.sessions:
            assert not self.slots.used, f"{self.slots.used} slots are held by nobody"
        if not planned.shares and block:
            wakes = [at for at in (planned.wait_until, self.runner.idle()) if at is not None]
            self._inbox.wait(min(wakes, default=None))
            if self.sessions:
                self.timings.wait += time.monotonic() - now
        return bool(planned.shares)

    def _plan(self, now: float) -> PassPlan:
        verifier = self.settings.verifier
        limits = Limits(
            verifier.prefill_chunk,
            self.pace.parts,
            verifier.row_budget,
            self.budget.step_seconds,
            headroom=MAX_ROWS,
        )
        planned = plan_pass(self.sessions.values(), self.slots, limits, now)
        for session in planned.preempted:
            drafting.pause(session)
        self.metrics.preemptions.inc(len(planned.preempted))
        self.metrics.prefix_cache_hits.inc(planned.matched)
        return planned

    def _drop_late_drafts(self, now: float, guarded: bool) -> None:
        """Ends the waiting for trees whose time is over, and for all while the guard is closed."""
        for session in self.sessions.values():
            awaited = session.draft.awaited
            if guarded:
                session.draft.forget_tree()
            elif awaited is not None and awaited.until <= now:
                drafting.miss(session, now, self.budget)

    # ---- gateways ----------------------------------------------------------

    def open(self, session: Session) -> None:
        """Takes in a session; a higher epoch replaces the one of the same id."""
        old = self.sessions.get(session.session_id)
        if old is not None and old.draft.epoch >= session.draft.epoch:
            message = f"session {session.session_id} is open with epoch {old.draft.epoch} already"
            session.sink(StepEvent(error=FailedPrecondition(message)))
            return
        if old is not None:
            self.close(old, Unavailable("replaced by a newer attachment"))
        if self.draining:
            session.sink(StepEvent(error=Unavailable("draining; try another verifier")))
        elif len(self.sessions) >= self.settings.verifier.max_sessions:
            message = f"{len(self.sessions)} sessions already; try again later"
            session.sink(StepEvent(error=ResourceExhausted(message)))
        elif session.longest > self.slots.capacity:
            most = f"of {self.slots.capacity} tokens at most (verifier.kv_slots)"
            error = InvalidArgument("prompt and max_tokens", session.longest, most)
            session.sink(StepEvent(error=error))
        else:
            self.sessions[session.session_id] = session
            session.sink(StepEvent())

    def cancel(self, session: Session) -> None:
        """The gateway has left: slots are free before the next pass."""
        if self.sessions.get(session.session_id) is session:
            self.close(session, None)

    def pause(self, session: Session) -> None:
        """The gateway does not keep up: the session takes part in no pass, and what it has computed
        stays until it is evicted."""
        self.slots.give_up(session.table, session.tokens)
        session.waiting = session.paused = True
        drafting.pause(session)

    def taken(self, session: Session, tokens: int) -> None:
        """The gateway has taken so many more tokens; a paused session goes on when half of the
        limit is left."""
        session.untaken -= tokens
        if session.untaken <= self.settings.verifier.max_untaken // 2:
            session.paused = False

    def close(self, session: Session, error: CoppiceError | None) -> None:
        """The prefix tree takes what a session has computed; its drafter is told, and its gateway
        of an error."""
        del self.sessions[session.session_id]
        self.slots.give_up(session.table, session.tokens)
        drafting.tell_closed(session, str(error) if error else "over")
        if error is not None:
            session.sink(StepEvent(error=error))

    def drain(self) -> None:
        self.draining = True

    # ---- drafters ----------------------------------------------------------

    def join(self, link: DraftLink, message: verifier_pb2.Join) -> None:
        session = self.sessions.get(message.session_id)
        if session is None:
            refusal = "unknown session"
        else:
            refusal = drafting.join(session, link, message.epoch)
        if refusal:
            drafting.send_closed(link, message.session_id, message.epoch, refusal)
        elif session is not None and session.pending == 1:
            self.tell_committed([(session, 0)])

    def _of(self, link: DraftLink, session_id: str, epoch: int) -> Session | None:
        """The session, if this drafter is its current one."""
        session = self.sessions.get(session_id)
        if session is None or session.draft.link is not link or session.draft.epoch != epoch:
            return None
        return session

    def receive_tree(self, link: DraftLink, message: verifier_pb2.Tree) -> None:
        session = self._of(link, message.session_id, message.epoch)
        if session is None:
            self.metrics.stale_drafts.inc()
            return
        stale = session.stats.stale_drafts
        try:
            vocab_size = self.runner.model.config.vocab_size
            drafting.receive_tree(session, message, vocab_size, time.monotonic(), self.budget)
        except MalformedDraft as error:
            session.stats.malformed_drafts += 1
            session.draft.awaited = None
            self.metrics.malformed_drafts.inc()
            refused = verifier_pb2.Refused(
                session_id=message.session_id,
                epoch=message.epoch,
                draft_id=message.draft_id,
                reason=str(error),
            )
            link.send(verifier_pb2.VerifierItem(refused=refused))
        self.metrics.stale_drafts.inc(session.stats.stale_drafts - stale)

    def receive_pass(self, link: DraftLink, message: verifier_pb2.Pass) -> None:
        session = self._of(link, message.session_id, message.epoch)
        if session is not None:
            drafting.receive_pass(session, message.base_length)

    def leave(self, link: DraftLink, message: verifier_pb2.Leave) -> None:
        session = self._of(link, message.session_id, message.epoch)
        if session is not None:
            drafting.leave(session)

    def lose(self, link: DraftLink) -> None:
        """A drafter's stream broke: its sessions go on plainly at once."""
        for session in self.sessions.values():
            if session.draft.link is link:
                drafting.leave(session)
                session.sink(StepEvent(drafter=session.drafter_state))

    def read_features(self, message: verifier_pb2.FeatureRequest) -> bytes:
        """Rows [start, end) of a session's features. Raises NotFound when they are not there."""
        session = self.sessions.get(message.session_id)
        if session is None or session.draft.epoch != message.epoch:
            raise NotFound(f"session {message.session_id}, epoch {message.epoch}: not here")
        if not message.start < message.end <= len(session.slots):
            shown = f"[{message.start}, {message.end}) of {len(session.slots)}"
            raise NotFound(f"features {shown}: not computed")
        return self.runner.read_features(session.slots[message.start : message.end])

    def running(self, read: int = 0) -> Running:
        """The sessions as they are now, after a pass that has read so many tokens of prompts."""
        running = [session.pending for session in self.sessions.values() if not session.waiting]
        decoding = running.count(1)
        return Running(decoding, max(1, read) if decoding < len(running) else 0)

    def tell_committed(self, committed: Iterable[tuple[Session, int]], read: int = 0) -> None:
        """Asks for trees of sessions that have committed, so many drafted tokens each, in a pass
        that has read so many tokens of prompts. A drafter hears of all at once: of one alone it
        would begin to draft for that one alone, and trees of the others would come a batch
        later."""
        running = self.running(read)
        asks: dict[DraftLink, list[verifier_pb2.VerifierItem]] = {}
        for session, accepted in committed:
            link = session.draft.link
            if link is not None and (item := self._ask(session, accepted, running)):
                asks.setdefault(link, []).append(item)
        for link, items in asks.items():
            link.send(*items)

    def _ask(
        self, session: Session, accepted: int, running: Running
    ) -> verifier_pb2.VerifierItem | None:
        grant, gap = Grant(0, running.decoding), drafting.gap_of(session)
        if not self.guard.closed:
            grant = self.budget.choose(running.decoding, running.reading, gap)
        self.metrics.node_budget.set(grant.nodes)
        self.metrics.grants.inc()
        self.metrics.granted_nodes.inc(grant.nodes)
        now = time.monotonic()
        item = drafting.ask(session, grant, gap, accepted, now, self._features)
        if item is not None:
            draft = session.draft
            draft.awaited = draft.patience.awaits(grant, now, self.budget)
            draft.gain = draft.patience.gain(grant.nodes, self.budget)
            if gap is not None:
                self.budget.catching_up.begins(gap.positions)
        return item

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free, or owned by exactly one session or node
        of the prefix tree."""
        self.slots.check_integrity([session.table for session in self.sessions.values()])
