"""A drafter in virtual time, and the sessions that it drafts for: parts of `simulation.py`."""

from dataclasses import dataclass, field

from benchmarks.hardware import Hardware
from verifier_svc.awaiting import Asks, Awaited, Patience
from verifier_svc.budget import Grant


@dataclass(slots=True, eq=False)
class Session:
    name: str
    left: int  # tokens
    drafter: "Drafter"
    pending: int = 1  # tokens without KV: more than one while the prompt is read
    length: int = 0  # committed tokens
    nodes: int = 0  # of its tree
    rerooted: int | None = None  # tokens that will be accepted of a late tree
    awaited: Awaited | None = None
    gain: float = 0.0
    in_play: bool = False  # its drafter has what it needs
    patience: Patience = field(default_factory=Patience)
    asks: Asks = field(default_factory=Asks)


@dataclass(frozen=True, slots=True)
class Draft:
    session: Session
    length: int  # that it is rooted at
    grant: Grant


@dataclass(slots=True, eq=False)
class Drafter:
    """Drafts for all who are due in one batch, when the one before is done."""

    hardware: Hardware
    slowness: float  # times the hardware's own draft times
    due: dict[Session, Grant] = field(default_factory=dict[Session, Grant])
    batch: list[Draft] = field(default_factory=list[Draft])
    left: float = 0.0  # seconds of the batch, with nothing beside it

    def start(self, noise: float) -> list[float]:
        """Begins the next batch; returns the seconds of its levels."""
        due, self.due = self.due, {}
        self.batch = [Draft(each, each.length, grant) for each, grant in due.items()]
        nodes = max(grant.nodes for grant in due.values())
        levels = self.hardware.level_seconds(nodes, len(due))
        levels = [self.slowness * noise * level for level in levels]
        self.left = sum(levels)
        return levels
