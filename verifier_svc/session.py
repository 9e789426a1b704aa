"""One sequence at the verifier: its tokens, its slots, and its draft."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coppice.errors import CoppiceError, InvalidArgument
from coppice.request import SamplingParams
from coppice.sampler import Sampler
from coppice.stopping import Finish, Stopper
from coppice.tree import MAX_ROWS, DraftTree
from protos import common_pb2, verifier_pb2
from verifier_svc.awaiting import Asks, Awaited, Patience
from verifier_svc.slot_pool import PageTable


@dataclass(frozen=True, slots=True)
class Logprobs:
    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a session tells its gateway after a step; an empty one says that it is registered."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    mode: common_pb2.DecodingMode.ValueType = common_pb2.DECODING_MODE_UNSPECIFIED
    nodes: int = 0
    accepted: int = 0
    drafter: verifier_pb2.DrafterState.ValueType = verifier_pb2.DRAFTER_STATE_NONE
    finish: Finish | None = None
    stats: common_pb2.SpeculationStats | None = None
    error: CoppiceError | None = None  # the session is over without an answer


class DraftLink(Protocol):
    """The verifier's side of one drafter's stream. Calls never block."""

    @property
    def name(self) -> str: ...
    @property
    def wants_features(self) -> bool: ...
    def send(self, *items: verifier_pb2.VerifierItem) -> None:
        """All of them at once."""
        ...


@dataclass(slots=True)
class DraftState:
    """What the verifier knows of a session's drafter. Only messages of `epoch` count."""

    epoch: int
    link: DraftLink | None = None
    lost: bool = False  # a drafter was there and is gone
    known: int = 0  # committed tokens that the drafter has been told
    told_paused: bool = False
    tree: DraftTree | None = None
    draft_id: int = 0
    drafted: DraftTree | None = None  # the tree with what was left out of it
    exact: bool = False  # the tree came in time, not re-rooted
    awaited: Awaited | None = None  # the tree of the last ask, until it is there
    gain: float = 0.0  # tokens expected of the tree that is there or awaited
    granted: int = 0  # nodes of a tree at most
    patience: Patience = field(default_factory=Patience)
    asks: Asks = field(default_factory=Asks)

    @property
    def in_play(self) -> bool:
        """Whether its drafter has been told of the session, and has not been told to pause."""
        return self.known > 0 and not self.told_paused

    def forget_tree(self) -> None:
        self.tree = self.drafted = None
        self.draft_id = 0
        self.awaited = None


@dataclass(slots=True)
class Session:
    """Invariant: 0 <= len(slots) < len(tokens); tokens[len(slots):] have no KV yet."""

    session_id: str
    params: SamplingParams
    tokens: list[int]  # prompt and committed
    prompt_length: int
    sampler: Sampler
    stopper: Stopper
    sink: Callable[[StepEvent], None]
    speculation: bool
    draft: DraftState
    table: PageTable = field(default_factory=PageTable)
    waiting: bool = True  # not admitted yet, preempted, or paused
    untaken: int = 0  # tokens that are still on their way to the gateway, as its sink counts them
    paused: bool = False  # too many of them: it waits for the gateway
    stats: common_pb2.SpeculationStats = field(default_factory=common_pb2.SpeculationStats)

    @property
    def slots(self) -> list[int]:
        return self.table.slots

    @property
    def longest(self) -> int:
        """Tokens that it will have in the end, at most."""
        return len(self.tokens) + self.stopper.left

    @property
    def pending(self) -> int:
        return len(self.tokens) - len(self.slots)

    @property
    def greedy(self) -> bool:
        """Whether the next step needs no more of its logits than the ids of the largest."""
        return self.sampler.is_argmax and self.params.logprobs is None

    @property
    def drafter_state(self) -> verifier_pb2.DrafterState.ValueType:
        if self.draft.link is not None:
            return verifier_pb2.DRAFTER_STATE_JOINED
        if self.draft.lost:
            return verifier_pb2.DRAFTER_STATE_LOST
        return verifier_pb2.DRAFTER_STATE_NONE

    def count_step(self, tree: DraftTree, accepted: int, guarded: bool) -> None:
        """Takes one decoding step into the statistics."""
        stats = self.stats
        if not len(tree):
            stats.guarded_steps += guarded
            stats.plain_steps += not guarded
            return
        stats.speculative_steps += 1
        stats.drafted_nodes += len(tree)
        stats.accepted_nodes += accepted
        stats.offered_depth += max(tree.depths())
        missing = accepted - len(stats.accepted_per_position)
        stats.accepted_per_position.extend([0] * max(0, min(missing, MAX_ROWS)))
        for position in range(accepted):
            stats.accepted_per_position[position] += 1


def new_session(
    session_id: str,
    epoch: int,
    prompt: Sequence[int],
    sampling: SamplingParams,
    min_tokens: int,
    stopper: Stopper,
    sink: Callable[[StepEvent], None],
    speculation: bool,
    committed: Sequence[int] = (),
) -> Session:
    """A session that goes on from `committed`, whatever was before. Without a seed it is 0.

    Raises InvalidArgument when the answer has ended with `committed`, FailedPrecondition when its
    grammar forbids it.
    """
    sampler = Sampler(
        sampling, sampling.seed or 0, prompt, min_tokens, stopper.ending_ids, stopper.grammar
    )
    for token in committed:
        sampler.accept(token)
        if stopper.push(token) is not None:
            raise InvalidArgument("committed", list(committed), "an answer that has not ended")
    return Session(
        session_id,
        sampling,
        [*prompt, *committed],
        len(prompt),
        sampler,
        stopper,
        sink,
        speculation,
        DraftState(epoch),
    )
