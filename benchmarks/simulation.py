"""Replays load through the verifier's own scheduler, guard and budget in virtual time: no model
runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.hardware import Hardware
from benchmarks.simulated_drafter import Draft, Drafter, Session
from benchmarks.traffic import Traffic
from coppice.settings import Settings
from coppice.tree import DraftTree
from verifier_svc.budget import Budget, Grant
from verifier_svc.guard import Guard
from verifier_svc.pacing import Part, PrefillPace
from verifier_svc.scheduler import Limits, SessionView, Share, plan

Mode = Literal["auto", "on", "off"]
MODES: tuple[Mode, ...] = ("auto", "on", "off")

_NOISE = 0.05  # standard deviation of what a pass or a draft takes
# Of the time of the traffic, until counting begins: the policy learns first.
_UNCOUNTED = 0.1
_SLOTS = 1 << 30  # there are enough


@dataclass(slots=True)
class Outcome:
    """Of one run, from when counting began."""

    seconds: float = 0.0
    tokens: float = 0.0  # by expectation, so that a short run tells as much as a long one
    guarded_seconds: float = 0.0
    drafting_seconds: float = 0.0  # of all drafters
    waiting_seconds: float = 0.0  # of the verifier, for trees
    grants: int = 0
    granted_nodes: int = 0
    switches: int = 0  # of the guard, from the start

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def node_budget_mean(self) -> float:
        return self.granted_nodes / max(self.grants, 1)

    @property
    def guard_share(self) -> float:
        return self.guarded_seconds / max(self.seconds, 1e-9)


class Simulation:
    """One verifier, and `drafters` by their slowness, whose sessions join them by turns. Prompts
    have `prompt` tokens, half as many to half as many again, and attention takes no time. Of a late
    tree the part below what was committed meanwhile is verified, with half
    of the nodes for each token of that."""

    def __init__(
        self,
        hardware: Hardware,
        mode: Mode,
        traffic: Traffic,
        settings: Settings,
        seed: int = 0,
        drafters: Sequence[float] = (1.0,),
        prompt: int = 1,
    ) -> None:
        speculation, rows = settings.speculation, settings.verifier.row_budget
        chunk = settings.verifier.prefill_chunk
        self.outcome = Outcome()
        self._hardware = hardware
        self._mode = mode
        self._traffic = traffic
        self._random = Random(seed)
        self._budget = Budget(speculation.nodes, rows, mode == "auto")
        self._guard = Guard(settings.guard, speculation.drafter, self._budget.advantage)
        self._pace = PrefillPace(chunk, self._budget.step_seconds)
        self._limits = Limits(chunk, self._pace.parts, rows, self._budget.step_seconds, headroom=0)
        self._prompt = prompt
        self._trees = [_chain(nodes) for nodes in range(speculation.nodes + 1)]
        self._drafters = [Drafter(hardware, slowness) for slowness in drafters]
        self._sessions: dict[str, Session] = {}
        self._arrived = 0
        self._came: list[Draft] = []  # while a pass ran
        self._running: tuple[Share, ...] = ()  # the pass
        self._started = 0.0
        self._beside = False  # drafts
        self._left = 0.0  # seconds of it, with nothing beside it
        self._now = 0.0
        measured = 1
        while measured <= max(rows, chunk):  # as a verifier does when it starts
            seconds = hardware.step_seconds(measured)
            self._pace.measure_rows(measured, seconds)
            if measured <= rows:
                self._budget.observe_step(measured, seconds)
            measured *= 2

    def run(self) -> Outcome:
        while self._advance():
            pass
        return self.outcome

    def _advance(self) -> bool:
        """To the next thing that ends; False when all is done."""
        if self._traffic.over(self._now):
            return False
        wake: float | None = None
        if not self._running:
            for tokens in self._traffic.arrivals(self._now, len(self._sessions)):
                drafter = self._drafters[self._arrived % len(self._drafters)]
                pending = self._random.randint((self._prompt + 1) // 2, self._prompt * 3 // 2)
                session = Session(str(self._arrived), tokens, drafter, pending)
                self._sessions[session.name] = session
                self._arrived += 1
            if self._sessions:
                wake = self._plan()
            else:
                wake = self._traffic.next_arrival(self._now)
                if wake is None:
                    return False
        self._elapse(wake)
        return True

    # ---- the verifier ------------------------------------------------------

    def _plan(self) -> float | None:
        """Begins a pass, or returns when to look again."""
        self._take_trees()
        before = self._guard.closed
        closed = self._mode == "auto" and self._guard.update(len(self._sessions), self._now)
        self.outcome.switches += closed != before
        for session in self._sessions.values():
            if closed:
                session.nodes, session.awaited = 0, None
            elif session.awaited is not None and session.awaited.until <= self._now:
                self._miss(session)
        views = [
            SessionView(each.name, each.pending, each.nodes, each.awaited, each.gain)
            for each in self._sessions.values()
        ]
        planned = plan(views, _SLOTS, self._limits, self._now)
        self._running = planned.shares
        if planned.shares:
            rows = sum(share.rows + share.nodes for share in planned.shares)
            self._started = self._now
            self._beside = any(each.asks.at_work for each in self._sessions.values())
            for share in planned.shares:
                session = self._sessions[share.session_id]
                if session.awaited is not None and session.awaited.expected <= self._now:
                    self._miss(session)
                session.asks.disturb()
            self._left = self._hardware.step_seconds(rows) * self._noise()
        return planned.wait_until

    def _take_trees(self) -> None:
        for draft in self._came:
            session = draft.session
            drafted = session.asks.answered(draft.length, self._now)
            if drafted is not None:
                self._budget.observe_draft(*drafted)
            behind = session.length - draft.length
            session.patience.came(in_time=not behind)
            if not behind:
                session.nodes, session.rerooted, session.awaited = draft.grant.nodes, None, None
            elif (left := len(self._accepted(draft.grant.nodes)) - behind) >= 0:
                session.nodes = max(1, draft.grant.nodes >> behind)
                session.rerooted = left
        self._came = []

    def _miss(self, session: Session) -> None:
        overdue = session.asks.overdue(self._now)
        if overdue is not None:
            self._budget.observe_draft(*overdue)
        session.awaited = None
        session.patience.missed()

    def _commit(self) -> None:
        rows = 0
        parts: list[Part] = []
        committed: list[Session] = []
        for share in self._running:
            session = self._sessions[share.session_id]
            if session.pending > 1:
                parts.append((share.rows, 0))
                session.pending -= share.rows
                if session.pending:
                    continue
                session.pending = 1  # the first token of the answer
            else:
                rows += share.rows + share.nodes
            self._walk(session, share.nodes)
            if session.left > 0:
                committed.append(session)
            else:
                del self._sessions[session.name]
                session.drafter.due.pop(session, None)
        decoding = sum(each.pending == 1 for each in self._sessions.values())
        read = max(1, sum(tokens for tokens, _ in parts)) if decoding < len(self._sessions) else 0
        for session in committed:
            self._ask(session, decoding, read)
        self._running = ()
        if self._beside:
            return
        if not parts:
            self._budget.observe_step(rows, self._now - self._started)
        elif rows:
            self._pace.observe(rows, [], parts, self._now - self._started)

    def _walk(self, session: Session, nodes: int) -> None:
        accepted = expected = 0.0
        if nodes and session.rerooted is not None:
            accepted = expected = session.rerooted
        elif nodes:
            rows = self._accepted(nodes)
            accepted, expected = len(rows), sum(self._hardware.accepted[:nodes])
            session.patience.verified(len(rows), self._budget.gain(session.nodes))
            self._budget.observe_walk(self._trees[session.nodes], rows, nodes)
        session.length += int(accepted) + 1
        session.left -= int(accepted) + 1
        session.nodes, session.rerooted, session.awaited = 0, None, None
        if self._counts:
            self.outcome.tokens += 1 + expected

    def _ask(self, session: Session, decoding: int, reading: int) -> None:
        grant = Grant(0, decoding)
        if self._mode != "off" and not self._guard.closed:
            grant = self._budget.choose(decoding, reading)
        if self._counts:
            self.outcome.grants += 1
            self.outcome.granted_nodes += grant.nodes
        if not grant.nodes and grant.once:
            return
        if not grant.nodes:
            session.in_play = False
            session.asks.clear()
            session.drafter.due.pop(session, None)
            return
        session.asks.add(session.length, self._now, grant, session.in_play)
        if not session.in_play:
            session.patience.bench()
        session.in_play = True
        session.awaited = session.patience.awaits(grant, self._now, self._budget)
        session.gain = session.patience.gain(grant.nodes, self._budget)
        session.drafter.due[session] = grant

    # ---- time --------------------------------------------------------------

    def _elapse(self, wake: float | None) -> None:
        """Until a pass or a draft ends, or `wake`. Where they share cores, each of two takes twice
        as long."""
        drafting = [each for each in self._drafters if each.batch]
        pace = 0.5 if self._hardware.shared and drafting and self._running else 1.0
        ends = [each.left / pace for each in drafting]
        if self._running:
            ends.append(self._left / pace)
        if wake is not None:
            ends.append(max(0.0, wake - self._now))
        passed = min(ends)
        self._count(passed, len(drafting))
        self._now += passed
        for each in drafting:
            each.left -= passed * pace
            if each.left <= 1e-12:
                self._came += [draft for draft in each.batch if draft.session.left > 0]
                each.batch = []
        self._left -= passed * pace
        if self._running and self._left <= 1e-12:
            self._commit()
        for each in self._drafters:
            if each.due and not each.batch:
                self._budget.observe_levels(each.start(self._noise()))

    def _count(self, seconds: float, drafting: int) -> None:
        if self._counts:
            self.outcome.seconds += seconds
            self.outcome.guarded_seconds += seconds * self._guard.closed
            self.outcome.drafting_seconds += seconds * drafting
            self.outcome.waiting_seconds += seconds * (bool(self._sessions) and not self._running)

    @property
    def _counts(self) -> bool:
        return self._now >= _UNCOUNTED * self._traffic.seconds

    def _accepted(self, nodes: int) -> list[int]:
        return self._hardware.walk(nodes, self._random)

    def _noise(self) -> float:
        return max(0.5, self._random.gauss(1.0, _NOISE))


def _chain(nodes: int) -> DraftTree:
    """A tree whose best nodes are its first ones."""
    return DraftTree(
        tuple(range(nodes)), tuple(range(nodes)), tuple(-float(i) for i in range(nodes))
    )
