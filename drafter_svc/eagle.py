"""The EAGLE-2 drafter: catches up on committed positions, then grows the trees of a whole batch.

One pass per level serves all sessions. Between calls the draft KV holds committed positions alone;
the slots of drafted nodes are scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from coppice.models.eagle_head import EagleHead
from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.draft_cache import CachedSession, DraftCache
from drafter_svc.drafter import DraftRequest, DraftTimes, Features
from drafter_svc.tree_builder import Frontier, GrowingTree, forwarded_at_most
from kernels.batch import AttentionBatch, Segment

CATCH_UP_ROWS = 256  # of one pass


@dataclass(slots=True)
class _Job:
    """A request while it is drafted."""

    request: DraftRequest
    session: CachedSession
    scratch: Tensor  # [most nodes ever forwarded] int64 slots
    tree: GrowingTree
    caught_up: int  # pairs whose K/V are written
    forwarded: int = 0  # nodes whose K/V are written

    @property
    def pairs(self) -> int:
        return len(self.request.tokens) - 1


@dataclass(frozen=True, slots=True)
class _Share:
    """A job's rows of the next pass."""

    job: _Job
    frontier: Frontier
    first_parent: int  # row of the last pass that the frontier's `parents` count from


class EagleDrafter:
    """A `Drafter` with an EAGLE-1/2 head."""

    features = Features.FINAL

    def __init__(self, head: EagleHead, kv_slots: int, top_k: int, depth: int) -> None:
        if top_k * (depth - 1) > MAX_ROWS:
            raise ValueError(f"top_k {top_k} * (depth {depth} - 1): must be at most {MAX_ROWS}")
        self._head = head
        self._top_k = top_k
        self._depth = depth
        self._pool = head.new_cache(kv_slots)
        self._cache = DraftCache(kv_slots, head.device)
        self._times = DraftTimes()
        self.identity = head.identity
        self.hidden_size = head.config.hidden_size
        self.vocab_size = head.config.vocab_size

    @property
    def times(self) -> DraftTimes:
        return self._times

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        return self._cache.features_needed(session_id, tokens)

    def forget(self, session_id: str) -> None:
        self._cache.forget(session_id)

    def check_integrity(self) -> None:
        """Raises AssertionError when a slot is lost or owned twice. Between calls only."""
        self._cache.check_integrity()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        started = perf_counter()
        busy = {request.session_id for request in requests}
        jobs: dict[str, _Job] = {}
        try:
            for request in requests:
                if (job := self._admit(request, busy)) is not None:
                    jobs[request.session_id] = job
            self._catch_up(list(jobs.values()))
            caught_up = perf_counter()
            levels = self._grow([job for job in jobs.values() if job.request.budget > 0])
        except BaseException:
            # Their slots may hold anything now.
            for session_id in jobs:
                self._cache.forget(session_id)
            raise
        finally:
            for job in jobs.values():
                self._cache.release(job.scratch)
        self._times = DraftTimes(caught_up - started, levels)
        return [
            jobs[r.session_id].tree.finished() if r.session_id in jobs else DraftTree()
            for r in requests
        ]

    def _admit(self, request: DraftRequest, busy: set[str]) -> _Job | None:
        """A job with its slots, or None if nothing can be drafted for this request."""
        pairs = len(request.tokens) - 1
        if pairs < 1:
            return None
        needed = self.features_needed(request.session_id, request.tokens)
        if needed < pairs and not _covers(request, needed, pairs, self.hidden_size):
            return None
        nodes = min(request.budget, MAX_ROWS - 1)
        scratch = forwarded_at_most(nodes, self._top_k, self._depth)
        found = self._cache.extend(request.session_id, request.tokens, scratch, busy)
        if found is None:
            return None
        tree = GrowingTree(nodes, self._top_k, self._depth)
        return _Job(request, *found, tree, caught_up=needed)

    def _catch_up(self, jobs: list[_Job]) -> None:
        """Writes K/V of the pairs that are new and predicts the roots' features."""
        behind = [job for job in jobs if job.caught_up < job.pairs]
        while behind:
            room, parts = CATCH_UP_ROWS, list[tuple[_Job, int]]()
            for job in behind:
                rows = min(room, job.pairs - job.caught_up)
                if rows:
                    parts.append((job, rows))
                    room -= rows
            self._catch_up_pass(parts)
            behind = [job for job in behind if job.caught_up < job.pairs]

    def _catch_up_pass(self, parts: list[tuple[_Job, int]]) -> None:
        tokens: list[int] = []
        features: list[Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for job, rows in parts:
            start, stop = job.caught_up, job.caught_up + rows
            given = job.request.features
            assert given is not None, "admitted without its features"
            tokens.extend(job.request.tokens[start + 1 : stop + 1])
            features.append(given.rows[start - given.start : stop - given.start])
            positions.extend(range(start, stop))
            slots = job.session.slots
            segments.append(Segment(rows, self._window(slots[:start]), slots[start:stop], None))
        hidden = self._forward(
            np.asarray(tokens),
            torch.cat([self._own(f) for f in features]),
            positions,
            segments,
            torch.cat([segment.tail for segment in segments]),
        )
        last = -1
        for job, rows in parts:
            last += rows
            job.caught_up += rows
            if job.caught_up == job.pairs:
                job.session.root_feature = hidden[last].clone()

    def _grow(self, jobs: list[_Job]) -> tuple[float, ...]:
        """Grows all trees to their ends; returns the seconds that each level took."""
        if not jobs:
            return ()
        seconds: list[float] = []
        started = perf_counter()
        hidden = torch.stack([_known(job.session.root_feature) for job in jobs])
        rows = [(job, 1) for job in jobs]
        while rows:
            best = self._head.best_tokens(hidden, self._top_k)
            tokens, log_probs = (part.cpu().numpy() for part in best)
            shares: list[_Share] = []
            first = 0
            for job, count in rows:
                mine = slice(first, first + count)
                frontier = job.tree.extend(tokens[mine], log_probs[mine])
                if len(frontier):
                    shares.append(_Share(job, frontier, first))
                first += count
            if shares:
                hidden = self._grow_pass(hidden, shares)
            rows = [(share.job, len(share.frontier)) for share in shares]
            seconds.append(perf_counter() - started)
            started = perf_counter()
        return tuple(seconds)

    def _grow_pass(self, hidden: Tensor, shares: list[_Share]) -> Tensor:
        """Predicted features [rows, hidden] of all frontier nodes, each from its parent's."""
        slots: list[Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        masks = self._own_ints(np.concatenate([share.frontier.masks for share in shares]))
        first = 0
        for share in shares:
            job, count = share.job, len(share.frontier)
            tail = job.scratch[: job.forwarded + count]
            slots.append(tail[job.forwarded :])
            positions.extend([job.pairs - 1 + share.frontier.level] * count)
            context = self._window(job.session.slots)
            segments.append(Segment(count, context, tail, masks[first : first + count]))
            job.forwarded += count
            first += count
        parents = np.concatenate([share.frontier.parents + share.first_parent for share in shares])
        tokens = np.concatenate([share.frontier.tokens for share in shares])
        features = hidden[self._own_ints(parents)]
        return self._forward(tokens, features, positions, segments, torch.cat(slots))

    def _forward(
        self,
        tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        features: Tensor,
        positions: list[int],
        segments: list[Segment],
        slots: Tensor,
    ) -> Tensor:
        batch = AttentionBatch(slots, self._own_ints(np.asarray(positions)), tuple(segments))
        return self._head.forward(self._own_ints(tokens), features, self._pool, batch)

    def _window(self, slots: Tensor) -> Tensor:
        """The head has not learnt distances beyond its own maximum context."""
        return slots[-self._head.config.max_context :]

    def _own(self, features: Tensor) -> Tensor:
        return features.to(device=self._head.device, dtype=self._head.dtype)

    def _own_ints(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(values).to(self._head.device)


def _covers(request: DraftRequest, start: int, end: int, hidden_size: int) -> bool:
    given = request.features
    if given is None or given.rows.shape[1] != hidden_size:
        return False
    return given.start <= start and end <= given.end


def _known(feature: Tensor | None) -> Tensor:
    assert feature is not None, "drafting from a session that was not caught up"
    return feature
