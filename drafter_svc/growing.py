"""What drafters share that run a network of their own: they catch up on committed positions, then
grow the trees of a whole batch.

One pass per level serves all sessions. Between calls the draft KV holds committed positions alone;
the slots of drafted nodes are scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coppice.tree import MAX_ROWS, DraftTree
from drafter_svc.draft_cache import CachedSession, DraftCache
from drafter_svc.drafter import DraftRequest, DraftTimes, Features
from drafter_svc.tree_builder import CandidateTree, Frontier, Ints, TreePolicy
from kernels.batch import AttentionBatch, KVCache, Segment

CATCH_UP_ROWS = 256  # of one pass
NO_TOKEN = -1


class DraftNetwork(Protocol):
    """A network that turns the tokens of a path, one per position, into the likeliest next ones."""

    identity: str
    features: Features
    hidden_size: int  # of the target whose features it reads; 0: it reads none
    vocab_size: int
    max_context: int  # positions that it has learnt to look back
    device: torch.device
    ahead: int  # position t holds token t + ahead: 1 beside the feature of t, 0 without features

    def new_cache(self, slots: int) -> KVCache: ...

    def reduce(self, features: Tensor) -> Tensor:
        """What `forward` takes [rows, hidden] of the target's features [rows, width], as they
        came; not asked of a network that reads none."""
        ...

    def forward(
        self, tokens: Tensor, features: Tensor | None, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Hidden states [rows, hidden] of tokens [rows]; K/V go into `cache`. Features [rows,
        hidden] are the target's, reduced, for committed positions, and below the root what was
        returned for the parent; a network that reads none gets None for committed ones."""
        ...

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """At most `count` next tokens of hidden [rows, hidden], likeliest first: target ids and
        log-probabilities (fp32)."""
        ...


@dataclass(slots=True)
class _Job:
    """A request while it is drafted."""

    request: DraftRequest
    line: Sequence[int]  # position t holds line[t + 1]
    session: CachedSession
    scratch: Tensor  # [most nodes ever forwarded] int64 slots
    tree: CandidateTree
    caught_up: int  # positions whose K/V are written
    forwarded: int = 0  # nodes whose K/V are written

    @property
    def positions(self) -> int:
        return len(self.line) - 1


@dataclass(frozen=True, slots=True)
class _Share:
    """A job's rows of the next pass."""

    job: _Job
    frontier: Frontier
    first_parent: int  # row of the last pass that the frontier's `parents` count from


class GrowingDrafter:
    """A `Drafter` whose trees a network grows level by level."""

    def __init__(self, network: DraftNetwork, kv_slots: int, policy: TreePolicy) -> None:
        self._network = network
        self._policy = policy
        self._pool = network.new_cache(kv_slots)
        self._cache = DraftCache(kv_slots, network.device)
        self._times = DraftTimes()
        self.identity = network.identity
        self.features = network.features
        self.hidden_size = network.hidden_size
        self.vocab_size = network.vocab_size

    @property
    def times(self) -> DraftTimes:
        return self._times

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        needed = self._cache.features_needed(session_id, self._line(tokens))
        return min(needed, max(len(tokens) - 1, 0))

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

    def _line(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the cache knows a session by: position t holds line[t + 1], whatever `ahead` is."""
        return tokens if self._network.ahead else (NO_TOKEN, *tokens)

    def _admit(self, request: DraftRequest, busy: set[str]) -> _Job | None:
        """A job with its slots, or None if nothing can be drafted for this request."""
        line = self._line(request.tokens)
        positions = len(line) - 1
        if positions < 1:
            return None
        needed = self._cache.features_needed(request.session_id, line)
        if needed < positions and not self._covers(request, needed, positions):
            return None
        nodes = min(request.budget, MAX_ROWS - 1)
        scratch = self._policy.forwarded_at_most(nodes)
        found = self._cache.extend(request.session_id, line, scratch, busy)
        if found is None:
            return None
        return _Job(request, line, *found, self._policy.new_tree(nodes), caught_up=needed)

    def _covers(self, request: DraftRequest, start: int, end: int) -> bool:
        if self.features is Features.NONE:
            return True
        given = request.features
        if given is None or given.rows.shape[1] != self.features.width(self.hidden_size):
            return False
        return given.start <= start and end <= given.end

    def _catch_up(self, jobs: list[_Job]) -> None:
        """Writes K/V of the positions that are new, up to the one that predicts the children of
        the root."""
        behind = [job for job in jobs if job.caught_up < job.positions]
        while behind:
            room, parts = CATCH_UP_ROWS, list[tuple[_Job, int]]()
            for job in behind:
                rows = min(room, job.positions - job.caught_up)
                if rows:
                    parts.append((job, rows))
                    room -= rows
            self._catch_up_pass(parts)
            behind = [job for job in behind if job.caught_up < job.positions]

    def _catch_up_pass(self, parts: list[tuple[_Job, int]]) -> None:
        tokens: list[int] = []
        features: list[Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for job, rows in parts:
            start, stop = job.caught_up, job.caught_up + rows
            if self.features is not Features.NONE:
                given = job.request.features
                assert given is not None, "admitted without its features"
                features.append(given.rows[start - given.start : stop - given.start])
            tokens.extend(job.line[start + 1 : stop + 1])
            positions.extend(range(start, stop))
            slots = job.session.slots
            segments.append(Segment(rows, self._window(slots[:start]), slots[start:stop], None))
        hidden = self._forward(
            np.asarray(tokens),
            self._network.reduce(torch.cat(features)) if features else None,
            positions,
            segments,
            torch.cat([segment.tail for segment in segments]),
        )
        last = -1
        for job, rows in parts:
            last += rows
            job.caught_up += rows
            if job.caught_up == job.positions:
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
            best = self._network.best_tokens(hidden, self._policy.children)
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
        """Hidden states [rows, hidden] of all frontier nodes; `hidden` are those of the frontier
        before."""
        slots: list[Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        masks = self._own_ints(np.concatenate([share.frontier.masks for share in shares]))
        first = 0
        for share in shares:
            job, count = share.job, len(share.frontier)
            tail = job.scratch[: job.forwarded + count]
            slots.append(tail[job.forwarded :])
            positions.extend([job.positions - 1 + share.frontier.level] * count)
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
        tokens: Ints,
        features: Tensor | None,
        positions: list[int],
        segments: list[Segment],
        slots: Tensor,
    ) -> Tensor:
        batch = AttentionBatch(slots, self._own_ints(np.asarray(positions)), tuple(segments))
        return self._network.forward(self._own_ints(tokens), features, self._pool, batch)

    def _window(self, slots: Tensor) -> Tensor:
        """The network has not learnt distances beyond its own maximum context."""
        return slots[-self._network.max_context :]

    def _own_ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._network.device)


def _known(feature: Tensor | None) -> Tensor:
    assert feature is not None, "drafting from a session that was not caught up"
    return feature
