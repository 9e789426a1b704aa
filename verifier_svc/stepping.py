"""One pass of the engine: allocate slots, run the target, walk the trees, commit."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from coppice.acceptance import Walk, walk
from coppice.errors import CoppiceError
from coppice.sampler import raw_logprobs
from coppice.stopping import Finish
from coppice.tree import DraftTree
from kernels import ops
from protos import common_pb2
from verifier_svc import drafting
from verifier_svc.pacing import Part
from verifier_svc.runner import Rows
from verifier_svc.scheduler import Share
from verifier_svc.session import Logprobs, Session, StepEvent

if TYPE_CHECKING:
    from verifier_svc.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A session's part of the running pass."""

    session: Session
    tree: DraftTree
    drafted: DraftTree  # the tree with what the grammar forbids, and what is not worth a row
    slots: list[int]  # taken for the rows
    prefill: bool

    @property
    def samples(self) -> bool:
        """Whether a token comes of it: not for the middle of a prompt."""
        return len(self.slots) >= self.session.pending


@dataclass(frozen=True, slots=True)
class _Mix:
    """What the time of a pass depends on, as it is when the pass begins."""

    rows: int  # of sessions that decode
    decoding: list[int]  # their contexts
    parts: list[Part]  # of prompts
    drafting_beside: bool  # perhaps on the same cores
    catching_up: bool

    @classmethod
    def of(cls, works: Sequence[Work]) -> "_Mix":
        decoding = [work for work in works if not work.prefill]
        asks = [work.session.draft.asks for work in works]
        return cls(
            sum(work.tree.rows for work in decoding),
            [len(work.session.slots) for work in decoding],
            [(len(work.slots), len(work.session.slots)) for work in works if work.prefill],
            any(each.at_work for each in asks),
            any(each.catching_up for each in asks),
        )


def run_pass(engine: "Engine", shares: Sequence[Share]) -> None:
    """Runs the planned shares, whose slots fit, and commits what comes of them."""
    now = time.monotonic()
    for share in shares:
        drafting.give_up(engine.sessions[share.session_id], now, engine.budget)
    works = [_take(engine, share) for share in shares]
    mix = _Mix.of(works)
    started = time.monotonic()
    logits = engine.runner.run([_rows(work) for work in works])
    verified = time.monotonic()
    accepted = [_commit(engine, work, rows) for work, rows in zip(works, logits, strict=True)]
    pairs = zip(works, accepted, strict=True)
    committed = [(work.session, count) for work, count in pairs if count is not None]
    engine.tell_committed(committed, sum(tokens for tokens, _ in mix.parts))
    done = time.monotonic()
    engine.timings.passes += 1
    engine.timings.verify += verified - started
    engine.timings.commit += done - verified
    engine.metrics.verify_latency.observe(verified - started)
    if mix.rows:
        _learn(engine, mix, done - started)


def _learn(engine: "Engine", mix: _Mix, seconds: float) -> None:
    """Of a pass with sessions that decode. One beside a drafter says little of other passes."""
    if mix.catching_up:
        foretold = engine.pace.foretold(mix.rows, mix.decoding, mix.parts)
        if foretold is not None:
            engine.budget.catching_up.delayed(seconds - foretold)
    elif mix.drafting_beside:
        return
    elif mix.parts:
        engine.pace.observe(mix.rows, mix.decoding, mix.parts, seconds)
    else:
        engine.budget.observe_step(mix.rows, seconds)
        engine.pace.observe_alone(mix.decoding)


def _take(engine: "Engine", share: Share) -> Work:
    session = engine.sessions[share.session_id]
    tree = session.draft.tree or DraftTree()
    drafted = session.draft.drafted or tree
    if share.nodes < len(tree):
        tree = drafted = tree.trimmed(share.nodes)
    slots = engine.slots.allocate(share.rows + len(tree))
    assert slots is not None, "the scheduler planned more slots than there are"
    return Work(session, tree, drafted, slots, prefill=session.pending > 1)


def _rows(work: Work) -> Rows:
    session, start = work.session, len(work.session.slots)
    if work.prefill:
        rows = len(work.slots)
        tokens = session.tokens[start : start + rows]
        positions = range(start, start + rows)
        wanted = int(work.samples)
        return Rows(tokens, positions, work.slots, session.slots, None, wanted, session.greedy)
    tokens = [session.tokens[-1], *work.tree.tokens]
    positions = [start + depth for depth in work.tree.depths()]
    masks = work.tree.masks()
    return Rows(tokens, positions, work.slots, session.slots, masks, work.tree.rows, session.greedy)


def _commit(engine: "Engine", work: Work, logits: Tensor) -> int | None:
    """How many drafted tokens came of it; None where no tree is to be asked for."""
    session = work.session
    if not work.samples:
        session.slots.extend(work.slots)
        engine.slots.share(session.table, session.tokens)
        return None
    logprobs: list[Logprobs] = []
    try:
        walked, finish = _walk(session, work.tree, logits, logprobs)
    except Exception as error:
        # What one request's parameters or the target's own numbers broke ends that request alone.
        log.exception("session %s: sampling failed", session.session_id)
        engine.slots.release(work.slots)
        engine.slots.discard(session.table)  # what may be broken is not for others
        known = isinstance(error, CoppiceError)
        engine.close(session, error if known else CoppiceError(f"sampling failed: {error}"))
        return None
    if work.prefill:
        session.slots.extend(work.slots)
        engine.slots.share(session.table, session.tokens)
    else:
        kept = [work.slots[row] for row in walked.rows]
        engine.slots.release(set(work.slots) - set(kept))
        session.slots.extend(kept)
    _report(engine, work, walked, logprobs, finish)
    if finish is not None:
        engine.budget.catching_up.ended(len(session.tokens) - session.prompt_length)
        engine.close(session, None)
        return None
    if session.untaken > engine.settings.verifier.max_untaken:
        engine.pause(session)
        return None
    return walked.accepted


def _walk(
    session: Session, tree: DraftTree, logits: Tensor, logprobs: list[Logprobs]
) -> tuple[Walk, Finish | None]:
    """Samples along the tree with logits [rows, vocab], of a greedy session with the ids of the
    largest [rows]; appends to the session's tokens."""
    # The argmax of all rows at once equals the sampler's row by row.
    argmax: list[int] | None = None
    if session.greedy:
        argmax = logits.tolist()
    elif session.sampler.is_argmax:
        argmax = ops.argmax(logits).tolist()
    finish: Finish | None = None

    def sample(row: int) -> int:
        if argmax is not None:
            token = argmax[row]
        else:
            token = session.sampler.sample(logits[row], len(session.tokens))
        if session.params.logprobs is not None:
            logprobs.append(
                Logprobs(token, *raw_logprobs(logits[row], token, session.params.logprobs))
            )
        return token

    def finished(token: int) -> bool:
        nonlocal finish
        session.tokens.append(token)
        session.sampler.accept(token)
        finish = session.stopper.push(token)
        return finish is not None

    return walk(tree, sample, finished), finish


def _report(
    engine: "Engine", work: Work, walked: Walk, logprobs: list[Logprobs], finish: Finish | None
) -> None:
    session, tree = work.session, work.tree
    if len(tree):
        mode = common_pb2.DECODING_MODE_SPECULATIVE
    elif work.prefill or len(session.tokens) == session.prompt_length + 1:
        mode = common_pb2.DECODING_MODE_PREFILL
    elif engine.guard.closed:
        mode = common_pb2.DECODING_MODE_GUARDED
    else:
        mode = common_pb2.DECODING_MODE_PLAIN
    if mode != common_pb2.DECODING_MODE_PREFILL:
        session.count_step(tree, walked.accepted, engine.guard.closed)
    engine.metrics.observe_step(tree, walked)
    if len(work.drafted) and session.draft.exact:
        gain = engine.budget.gain(len(work.drafted))
        session.draft.patience.verified(walked.accepted, gain)
        # What was drafted in vain was drafted, too.
        path = work.drafted.path(walked.tokens[: walked.accepted])
        engine.budget.observe_walk(work.drafted, path or (), len(tree))
        engine.budget.calibration.observe(work.drafted, walked.tokens)
    # The session goes on counting while another thread reads this.
    stats = common_pb2.SpeculationStats()
    stats.CopyFrom(session.stats)
    session.sink(
        StepEvent(
            walked.tokens,
            tuple(logprobs),
            mode,
            len(tree),
            walked.accepted,
            session.drafter_state,
            finish,
            stats,
        )
    )
