"""The interface of every drafter: sessions with their committed tokens in, trees out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from coppice.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Features:
    """What a drafter reads of the target beside its tokens: hidden vectors, side by side."""

    NONE: ClassVar["Features"]
    FINAL: ClassVar["Features"]

    final: bool = False  # the one after the final norm
    layers: tuple[int, ...] = ()  # else the inputs of these layers (EAGLE-3)

    def width(self, hidden_size: int) -> int:
        """Values of one position."""
        return hidden_size * (1 if self.final else len(self.layers))


Features.NONE = Features()
Features.FINAL = Features(final=True)


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The target's features of consecutive positions."""

    start: int
    rows: Tensor  # [positions, width]

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
    hidden_size: int  # of the target whose features it reads; 0: any
    vocab_size: int  # 0: any

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each of the requests (of distinct sessions), all drafted in one batch.

        A tree is empty where nothing can be proposed: no budget, features missing, no room.
        """
        ...

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        """The first position that the session's next request has to run, and whose feature it must
        bring if any are read, in [0, len(tokens) - 1]; at len(tokens) - 1, the root's, none is
        missing."""
        ...

    def forget(self, session_id: str) -> None:
        """Drops all that is kept of a session, if anything is."""
        ...

    @property
    def times(self) -> DraftTimes:
        """Of the last `propose`."""
        ...
