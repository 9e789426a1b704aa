"""The draft engine: batches sessions that wait for a tree, and drafts them in a thread of its own.

Whatever arrives while a batch is drafted waits for the next one. A tree that has become stale
meanwhile is sent all the same: the verifier re-roots or drops it.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Protocol

from coppice.errors import CoppiceError
from coppice.tree import DraftTree
from drafter_svc.drafter import Drafter, DraftRequest, DraftTimes, FeatureRows, Features
from drafter_svc.session import Outcome, Session, Update
from drafter_svc.telemetry import DraftMetrics

logger = logging.getLogger(__name__)

# Positions of one session that are run in one batch: nobody waits for somebody's long prompt.
CATCH_UP_POSITIONS = 256


class Verifier(Protocol):
    """The far side of a session. Sending never waits."""

    def join(self, session_id: str, epoch: int) -> None:
        """Raises FailedPrecondition while the verifier is known to misfit."""
        ...

    def leave(self, session_id: str, epoch: int) -> None: ...

    def send_tree(
        self, session_id: str, epoch: int, base_length: int, draft_id: int, tree: DraftTree
    ) -> None: ...

    def send_pass(self, session_id: str, epoch: int, base_length: int) -> None: ...

    def send_latency(self, times: DraftTimes) -> None: ...

    async def pull(self, session_id: str, epoch: int, positions: range) -> FeatureRows:
        """Raises CoppiceError when the rows can't be had in time."""
        ...


@dataclass(slots=True, eq=False)
class _Attached:
    session: Session
    verifier: Verifier
    pull: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Lacking:
    """In place of a tree: features from this position on are needed first."""

    needed: int


@dataclass(frozen=True, slots=True)
class _Behind:
    """In place of a tree: a part of a long catch-up was done, and more is to come."""


class DraftEngine:
    """Runs one drafter for all attached sessions. Not thread-safe: one event loop calls it."""

    def __init__(self, drafter: Drafter, metrics: DraftMetrics) -> None:
        self._drafter = drafter
        self._metrics = metrics
        self._attached: dict[str, _Attached] = {}
        self._wake = asyncio.Event()
        self._draft_ids = count(1)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run(), name="draft engine")

    async def close(self) -> None:
        """Ends all tasks and, after the batch in hand, the thread."""
        tasks = [attached.pull for attached in self._attached.values()]
        self._attached.clear()
        running = [task for task in (self._loop, *tasks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def sessions(self) -> int:
        """How many are attached."""
        return len(self._attached)

    def attach(self, session_id: str, epoch: int, verifier: Verifier) -> None:
        """Joins the session at `verifier`, and leaves an earlier attachment of it. An epoch that
        is not above the known one is ignored. Raises FailedPrecondition as `join` does."""
        known = self._attached.get(session_id)
        if known is not None and known.session.epoch >= epoch:
            return
        if known is not None:
            self._drop(known)
            known.verifier.leave(session_id, known.session.epoch)
        verifier.join(session_id, epoch)
        self._attached[session_id] = _Attached(Session(session_id, epoch), verifier)
        self._metrics.sessions.set(len(self._attached))

    def detach(self, session_id: str) -> None:
        """Leaves the session, if it is attached."""
        attached = self._attached.get(session_id)
        if attached is not None:
            attached.verifier.leave(session_id, attached.session.epoch)
            self.ended(session_id, attached.session.epoch, forget=True)

    def ended(self, session_id: str, epoch: int, forget: bool) -> None:
        """The attachment is over. `forget` false: it may well come back, so its draft KV stays
        until its slots are needed."""
        attached = self._find(session_id, epoch)
        if attached is None:
            return
        self._drop(attached)
        if forget:
            self._thread.submit(self._drafter.forget, session_id)

    def committed(self, session_id: str, update: Update) -> None:
        attached = self._find(session_id, update.epoch)
        if attached is None:
            return
        outcome = attached.session.apply(update)
        if outcome is Outcome.GAP:
            logger.warning("session %s: committed tokens do not connect, joining again", session_id)
            attached.verifier.join(session_id, update.epoch)
        elif attached.session.due:
            self._wake.set()

    def paused(self, session_id: str, epoch: int) -> None:
        attached = self._find(session_id, epoch)
        if attached is not None:
            attached.session.pause(epoch)

    def _find(self, session_id: str, epoch: int) -> _Attached | None:
        attached = self._attached.get(session_id)
        return attached if attached is not None and attached.session.epoch == epoch else None

    def _drop(self, attached: _Attached) -> None:
        if attached.pull is not None:
            attached.pull.cancel()
        del self._attached[attached.session.session_id]
        self._metrics.sessions.set(len(self._attached))

    def _is_current(self, attached: _Attached) -> bool:
        return self._attached.get(attached.session.session_id) is attached

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            due = [a for a in self._attached.values() if a.session.due and a.pull is None]
            for attached in due:
                attached.session.taken()
                if not attached.session.worth_drafting:
                    self._pass(attached, attached.session.base_length)
            batch = [attached for attached in due if attached.session.worth_drafting]
            if batch:
                await self._draft_batch(batch)

    async def _draft_batch(self, batch: Sequence[_Attached]) -> None:
        requests = [attached.session.request() for attached in batch]
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._draft, requests)
        except Exception:
            # A defect of the drafter must not end the service; the verifier decodes plainly.
            logger.exception("drafting failed")
            answers = [DraftTree() for _ in requests]
        drafted = [
            (attached, request, answer)
            for attached, request, answer in zip(batch, requests, answers, strict=True)
            if self._is_current(attached)
        ]
        for attached, request, answer in drafted:
            if isinstance(answer, _Lacking):
                attached.pull = asyncio.create_task(self._pull(attached, answer.needed))
            elif isinstance(answer, _Behind):
                attached.session.renew()
                self._wake.set()
            else:
                self._answer(attached, request, answer)
        if any(isinstance(answer, DraftTree) for answer in answers):
            for verifier in {attached.verifier for attached, _, _ in drafted}:
                verifier.send_latency(self._drafter.times)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree | _Lacking | _Behind]:
        """In the drafter's thread: trees where the features suffice."""
        able: list[DraftRequest] = []
        lacking: dict[str, _Lacking] = {}
        behind: dict[str, int] = {}  # the position that each long catch-up starts from
        reads = self._drafter.features is not Features.NONE
        for request in requests:
            needed = self._drafter.features_needed(request.session_id, request.tokens)
            missing = len(request.tokens) - 1 - needed
            if missing and reads and not _holds(request, needed):
                lacking[request.session_id] = _Lacking(needed)
            elif missing > CATCH_UP_POSITIONS:
                behind[request.session_id] = needed
                part = request.tokens[: needed + 1 + CATCH_UP_POSITIONS]
                able.append(replace(request, tokens=part, budget=0))
            else:
                able.append(request)
        answers: dict[str, DraftTree | _Lacking | _Behind] = {**lacking}
        if able:
            started = perf_counter()
            trees = self._drafter.propose(able)
            self._metrics.latency.observe(perf_counter() - started)
            for request, tree in zip(able, trees, strict=True):
                start = behind.get(request.session_id)
                # Without room there is no progress, and no sense in another try.
                more = start is not None and self._advanced(request, start)
                answers[request.session_id] = _Behind() if more else tree
        return [answers[request.session_id] for request in requests]

    def _advanced(self, request: DraftRequest, start: int) -> bool:
        return self._drafter.features_needed(request.session_id, request.tokens) > start

    def _answer(self, attached: _Attached, request: DraftRequest, tree: DraftTree) -> None:
        session, base_length = attached.session, len(request.tokens)
        # One that reads tokens alone may find something at any of them.
        proposed = len(tree) > 0 or self._drafter.features is Features.NONE
        session.drafted(request, proposed)
        if not len(tree):
            self._pass(attached, base_length)
            return
        self._metrics.nodes.inc(len(tree))
        attached.verifier.send_tree(
            session.session_id, session.epoch, base_length, next(self._draft_ids), tree
        )

    def _pass(self, attached: _Attached, base_length: int) -> None:
        session = attached.session
        attached.verifier.send_pass(session.session_id, session.epoch, base_length)

    async def _pull(self, attached: _Attached, needed: int) -> None:
        session = attached.session
        positions = session.missing_features(needed)
        try:
            if positions:
                session.add_features(
                    await attached.verifier.pull(session.session_id, session.epoch, positions)
                )
            session.renew()
        except CoppiceError as error:
            logger.info("session %s: no features: %s", session.session_id, error)
            self._pass(attached, session.base_length)
        finally:
            attached.pull = None
            self._wake.set()


def _holds(request: DraftRequest, needed: int) -> bool:
    given = request.features
    return given is not None and given.start <= needed and given.end >= len(request.tokens) - 1
