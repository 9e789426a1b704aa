"""Replays load through the verifier's own guard and budget in virtual time: no model runs."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.hardware import Hardware
from benchmarks.traffic import Traffic
from coppice.settings import Settings
from coppice.tree import DraftTree
from verifier_svc.budget import Budget, Grant
from verifier_svc.guard import Guard

Mode = Literal["auto", "on", "off"]
MODES: tuple[Mode, ...] = ("auto", "on", "off")

_NOISE = 0.05  # standard deviation of what a pass or a draft takes
# Of the time of the traffic, until counting begins: the policy learns first.
_UNCOUNTED = 0.1


@dataclass(slots=True)
class Outcome:
    """Of one run, from when counting began."""

    seconds: float = 0.0
    tokens: float = 0.0  # by expectation, so that a short run tells as much as a long one
    guarded_seconds: float = 0.0
    drafting_seconds: float = 0.0
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


@dataclass(slots=True)
class _Session:
    left: int  # tokens
    nodes: int = 0  # of its tree
    ready_at: float = 0.0  # when that is there
    in_play: bool = False  # its drafter has what it needs, and so is awaited


class Simulation:
    """One verifier with one drafter. Prompts take no time, and trees are awaited however long they
    take: the budget has to see to it that this pays."""

    def __init__(
        self, hardware: Hardware, mode: Mode, traffic: Traffic, settings: Settings, seed: int = 0
    ) -> None:
        speculation, rows = settings.speculation, settings.verifier.row_budget
        self.outcome = Outcome()
        self._hardware = hardware
        self._mode = mode
        self._traffic = traffic
        self._random = Random(seed)
        self._budget = Budget(speculation.nodes, rows, mode == "auto")
        self._guard = Guard(settings.guard, speculation.drafter, self._budget.advantage)
        self._trees = [_chain(nodes) for nodes in range(speculation.nodes + 1)]
        self._sessions: list[_Session] = []
        self._now = 0.0
        self._drafter_free_at = 0.0
        measured = 1
        while measured <= rows:  # as a verifier does when it starts
            self._budget.observe_step(measured, hardware.step_seconds(measured))
            measured *= 2

    def run(self) -> Outcome:
        while self._advance():
            pass
        return self.outcome

    def _advance(self) -> bool:
        """To the end of the next pass, or to when one can start; False when all is done."""
        started = self._now
        if self._traffic.over(started):
            return False
        for tokens in self._traffic.arrivals(self._now, len(self._sessions)):
            self._sessions.append(_Session(tokens, ready_at=self._now))
        self._update_guard()
        waiting = [session for session in self._sessions if session.ready_at > self._now]
        ready = [session for session in self._sessions if session.ready_at <= self._now]
        if not self._sessions:
            coming = self._traffic.next_arrival(self._now)
            if coming is None:
                return False
            self._now = coming
        elif waiting and (len(ready) < len(waiting) or all(s.nodes for s in ready)):
            self._now = min(session.ready_at for session in waiting)
        else:
            self._pass(ready)
        if self._counts:
            self.outcome.seconds += self._now - started
            self.outcome.guarded_seconds += (self._now - started) * self._guard.closed
        return True

    @property
    def _counts(self) -> bool:
        return self._now >= _UNCOUNTED * self._traffic.seconds

    def _update_guard(self) -> None:
        before = self._guard.closed
        if self._mode == "auto" and self._guard.update(len(self._sessions), self._now):
            for session in self._sessions:
                session.nodes, session.ready_at = 0, self._now
        self.outcome.switches += self._guard.closed != before

    def _pass(self, ready: list[_Session]) -> None:
        rows = sum(1 + session.nodes for session in ready)
        seconds = self._hardware.step_seconds(rows) * self._noise()
        self._now += seconds
        decoding = len(self._sessions)
        asked: list[tuple[_Session, Grant]] = []
        for session in ready:
            self._walk(session)
            grant = self._granted(session, decoding)
            if grant.nodes:
                asked.append((session, grant))
            session.in_play = session.in_play and grant.nodes > 0
            session.nodes = grant.nodes if session.in_play else 0
        self._sessions = [session for session in self._sessions if session.left > 0]
        self._draft([(session, grant) for session, grant in asked if session.left > 0])
        self._budget.observe_step(rows, seconds)

    def _walk(self, session: _Session) -> None:
        accepted = self._hardware.walk(session.nodes, self._random)
        if session.nodes and self._mode == "auto":
            self._budget.observe_walk(self._trees[session.nodes], accepted)
        session.left -= len(accepted) + 1
        if self._counts:
            self.outcome.tokens += 1 + sum(self._hardware.accepted[: session.nodes])

    def _granted(self, session: _Session, decoding: int) -> Grant:
        grant = Grant(0, decoding)
        if self._mode != "off" and not self._guard.closed:
            grant = self._budget.choose(decoding)
        if self._counts:
            self.outcome.grants += 1
            self.outcome.granted_nodes += grant.nodes
        return grant

    def _draft(self, asked: list[tuple[_Session, Grant]]) -> None:
        """In one batch, when the one before is done. Who was not in play catches up, and nobody
        waits for that; its tree comes too late to be of use."""
        if not asked:
            return
        nodes = max(grant.nodes for _, grant in asked)
        noise = self._noise()
        levels = [noise * level for level in self._hardware.level_seconds(nodes, len(asked))]
        self._budget.observe_levels(levels)
        seconds = sum(levels)
        start = max(self._now, self._drafter_free_at)
        self._drafter_free_at = start + seconds
        if self._counts:
            self.outcome.drafting_seconds += seconds
        for session, grant in asked:
            if session.in_play:
                session.ready_at = self._drafter_free_at
                self._budget.observe_draft(grant, session.ready_at - self._now)
            session.in_play = True

    def _noise(self) -> float:
        return max(0.5, self._random.gauss(1.0, _NOISE))


def _chain(nodes: int) -> DraftTree:
    """A tree whose best nodes are its first ones."""
    return DraftTree(
        tuple(range(nodes)), tuple(range(nodes)), tuple(-float(i) for i in range(nodes))
    )
