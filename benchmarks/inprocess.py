"""Verifier engine and drafter in one process and one thread, without the wire between them.

What is measured here is the algorithm and the kernels; `decode.py` compares it with the service.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from coppice.models.placement import dtype_name
from coppice.request import SamplingParams, StoppingParams
from coppice.stopping import Stopper
from drafter_svc import wire
from drafter_svc.drafter import Drafter, FeatureRows, Features
from drafter_svc.session import Session as DraftSession
from protos import common_pb2, verifier_pb2
from verifier_svc.engine import Engine
from verifier_svc.session import Logprobs, StepEvent, new_session

EPOCH = 1


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    stats: common_pb2.SpeculationStats = field(default_factory=common_pb2.SpeculationStats)

    def take(self, event: StepEvent) -> None:
        if event.error is not None:
            raise event.error
        self.tokens.extend(event.tokens)
        self.logprobs.extend(event.logprobs)
        if event.stats is not None:
            self.stats.CopyFrom(event.stats)


class LocalLink:
    """A drafter joined to an engine by calls: all sessions that are due are drafted in one batch
    before the next pass, so no pass ever waits or lacks its tree."""

    name = "local"

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self.seconds = 0.0  # spent drafting
        self.batches = 0
        self.wants_features = drafter.features is not Features.NONE
        self._width = drafter.features.width(drafter.hidden_size)
        self._engine = engine
        self._drafter = drafter
        self._sessions: dict[str, DraftSession] = {}

    def join(self, session_id: str) -> None:
        self._sessions[session_id] = DraftSession(session_id, EPOCH)
        message = verifier_pb2.Join(session_id=session_id, epoch=EPOCH)
        self._engine.post(lambda: self._engine.join(self, message))

    def send(self, *items: verifier_pb2.VerifierItem) -> None:
        for item in items:
            self._take(item)

    def _take(self, item: verifier_pb2.VerifierItem) -> None:
        if item.WhichOneof("item") == "committed":
            update = wire.update(item.committed, self._width)
            self._sessions[item.committed.session_id].apply(update)
        elif item.WhichOneof("item") == "closed":
            self._drafter.forget(item.closed.session_id)
            del self._sessions[item.closed.session_id]

    def draft(self) -> None:
        """Drafts for all sessions that are due, and hands the trees to the engine."""
        due = [session for session in self._sessions.values() if session.due]
        if not due:
            return
        started = perf_counter()
        if self.wants_features:
            for session in due:
                self._pull(session)
        requests = [session.request() for session in due]
        for session, request, tree in zip(
            due, requests, self._drafter.propose(requests), strict=True
        ):
            session.taken()
            session.drafted(request, proposed=True)
            base_length = len(request.tokens)
            item = wire.tree(session.session_id, EPOCH, base_length, base_length, tree)
            self._engine.receive_tree(self, item.tree)
        self.seconds += perf_counter() - started
        self.batches += 1

    def _pull(self, session: DraftSession) -> None:
        request = session.request()
        needed = self._drafter.features_needed(session.session_id, request.tokens)
        missing = session.missing_features(needed)
        if not missing:
            return
        message = verifier_pb2.FeatureRequest(
            session_id=session.session_id, epoch=EPOCH, start=missing.start, end=missing.stop
        )
        dtype = dtype_name(self._engine.runner.model.dtype)
        data = self._engine.read_features(message)
        rows = wire.feature_rows(data, dtype, self._width)
        session.add_features(FeatureRows(missing.start, rows))


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    stopping: StoppingParams,
    link: LocalLink | None = None,
) -> list[Answer]:
    """Answers all prompts at once, with speculation when there is a link."""
    answers = [Answer() for _ in prompts]
    eos = engine.runner.model.config.eos_token_ids
    max_tokens = stopping.max_tokens or 128
    for index, prompt in enumerate(prompts):
        stopper = Stopper(stopping, eos, max_tokens, None)
        session = new_session(
            str(index),
            EPOCH,
            prompt,
            sampling,
            stopping.min_tokens,
            stopper,
            answers[index].take,
            link is not None,
        )
        engine.post(lambda session=session: engine.open(session))
        if link is not None:
            link.join(str(index))
    engine.step(block=False)
    while engine.sessions:
        if link is not None:
            link.draft()
        engine.step(block=False)
    return answers
