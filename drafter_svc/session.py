"""What the drafter's side knows of one session: its tokens, its features, and what is due.

Pure bookkeeping: no I/O, no clock, no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from drafter_svc.drafter import DraftRequest, FeatureRows

# A drafter that had no room is not asked again (nor fed) before this many more tokens.
TOKENS_BETWEEN_ATTEMPTS = 32


@dataclass(frozen=True, slots=True)
class Update:
    """A `Committed`: tokens [start, base_length) of the session, and the next tree's budget."""

    epoch: int
    start: int
    base_length: int
    tokens: Sequence[int]
    budget: int
    features: FeatureRows | None = None


class Outcome(Enum):
    """What became of an `Update`."""

    APPLIED = auto()
    IGNORED = auto()  # of another epoch, or on the way since before a re-join
    GAP = auto()  # it does not continue what is known: the session has to be joined again


class Session:
    """One attachment of a session. Tokens are the verifier's word; `features` are those that were
    received and not yet drafted from."""

    def __init__(self, session_id: str, epoch: int) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self._tokens: list[int] = []
        self._features: list[FeatureRows] = []  # consecutive
        self._budget = 0
        self._due = False
        self._joining = True
        self._next_attempt = 0

    @property
    def base_length(self) -> int:
        return len(self._tokens)

    @property
    def due(self) -> bool:
        """Whether a tree or a pass is owed for the last update."""
        return self._due

    @property
    def worth_drafting(self) -> bool:
        return self.base_length >= self._next_attempt

    def apply(self, update: Update) -> Outcome:
        if update.epoch != self.epoch or (self._joining and update.start > 0):
            return Outcome.IGNORED
        misshapen = update.start + len(update.tokens) != update.base_length
        if misshapen or update.start > self.base_length:
            self._joining, self._due = True, False
            return Outcome.GAP
        self._joining = False
        del self._tokens[update.start :]
        self._tokens.extend(update.tokens)
        self._keep_features_before(update.start)
        self._budget = update.budget
        self._due = update.budget > 0
        if update.features is not None:
            self.add_features(update.features)
        return Outcome.APPLIED

    def pause(self, epoch: int) -> None:
        if epoch == self.epoch:
            self._budget, self._due = 0, False

    def request(self) -> DraftRequest:
        """What is to be drafted now, with a copy of the tokens for another thread."""
        if len(self._features) > 1:
            rows = torch.cat([part.rows for part in self._features])  # [positions, hidden]
            self._features = [FeatureRows(self._features[0].start, rows)]
        features = self._features[0] if self._features else None
        return DraftRequest(self.session_id, tuple(self._tokens), self._budget, features)

    def taken(self) -> None:
        """The last update is being answered."""
        self._due = False

    def renew(self) -> None:
        """An answer is due again: what it lacked is there."""
        self._due = not self._joining and self._budget > 0

    def drafted(self, request: DraftRequest, proposed: bool) -> None:
        """The drafter has seen `request`; its features are not needed a second time."""
        self._drop_features_before(len(request.tokens) - 1)
        if not proposed and len(request.tokens) > 1:
            self._next_attempt = len(request.tokens) + TOKENS_BETWEEN_ATTEMPTS

    def missing_features(self, needed: int) -> range:
        """The positions to pull so that `needed` up to the root's are all there."""
        last = self.base_length - 1
        held = (
            range(self._features[0].start, self._features[-1].end) if self._features else range(0)
        )
        start = held.stop if held.start <= needed < held.stop else needed
        return range(min(start, last), last)

    def add_features(self, added: FeatureRows) -> None:
        """Rows that continue those held, or that go before or replace them."""
        held = self._features
        if held and held[0].start <= added.start <= held[-1].end:
            self._keep_features_before(added.start)
            self._features.append(added)
        elif held and added.start < held[0].start <= added.end < held[-1].end:
            self._drop_features_before(added.end)
            self._features.insert(0, added)
        else:
            self._features = [added]

    def _keep_features_before(self, position: int) -> None:
        self._features = [
            FeatureRows(part.start, part.rows[: position - part.start])
            for part in self._features
            if part.start < position
        ]

    def _drop_features_before(self, position: int) -> None:
        self._features = [
            FeatureRows(max(part.start, position), part.rows[max(position - part.start, 0) :])
            for part in self._features
            if part.end > position
        ]
