"""The interface of every drafter: sessions with their committed tokens in, trees out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from coppice.tree import DraftTree


class Features(StrEnum):
    """What a drafter reads of the target beside its tokens."""

    NONE = "none"
    FINAL = "final"  # the hidden state after the final norm


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The target's features of consecutive positions."""

    start: int
    rows: Tensor  # [positions, hidden]

    @property
    def end(self) -> int:
        return self.start + self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One session that wants a tree below its last committed token (the root)."""

    session_id: str
    tokens: Sequence[int]  # all that is committed, prompt included
    budget: int  # nodes at most; 0: only take the tokens and features in
    features: FeatureRows | None = None  # up to the root, from `features_needed` on or earlier


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Where the time of one `propose` went."""

    catch_up_seconds: float = 0.0  # running the missing positions
    seconds_per_depth: tuple[float, ...] = ()


class Drafter(Protocol):
    """Used by one thread at a time; whatever it keeps of a session it can do without."""

    identity: str
    features: Features
    hidden_size: int  # of the features that it reads; 0: any
    vocab_size: int  # 0: any

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each of the requests (of distinct sessions), all drafted in one batch.

        A tree is empty where nothing can be proposed: no budget, features missing, no room.
        """
        ...

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        """The first position whose feature the session's next request must bring, in
        [0, len(tokens) - 1]; at len(tokens) - 1, the root's, none is missing."""
        ...

    def forget(self, session_id: str) -> None:
        """Drops all that is kept of a session, if anything is."""
        ...

    @property
    def times(self) -> DraftTimes:
        """Of the last `propose`."""
        ...
