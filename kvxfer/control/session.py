"""Peers: who they are, what they have registered, and when they were last heard of.

| state    | meaning                                             | leaves by |
| ---      | ---                                                 | --- |
| GREETING | Hello is out, or its regions are being loaded       | loaded → READY |
| READY    | its regions are known to the connector              | silence, Goodbye → GONE |
| GONE     | fenced off: nothing is sent to it or believed of it | a new Hello → GREETING |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvxfer.control.messages import RegionsUpdate, WorkerFacts
from kvxfer.errors import HandshakeRejected, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import choose_direction
from kvxfer.transfer.regions import RegionSet


class PeerState(enum.Enum):
    GREETING = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@dataclass
class Peer:
    """A worker at the other end of a pair. Owned by the control thread."""

    key: str
    """What the channel calls it."""
    last_seen_s: float
    state: PeerState = PeerState.GREETING
    facts: WorkerFacts | None = None
    direction: Direction | None = None
    regions: RegionSet = field(default_factory=RegionSet)
    hello_sent_s: float = 0.0
    """When we, who dialled, last greeted it; 0 when we did not."""
    acked_generation: int = 0
    """The newest of our generations that it has loaded."""

    @property
    def name(self) -> str:
        return self.facts.worker_id if self.facts else self.key

    def learn(self, facts: WorkerFacts, direction: Direction) -> None:
        """Take over what Hello or Welcome said. Raises RegionError on bad regions."""
        self.regions = RegionSet(tuple(facts.regions), facts.generation)
        self.facts = facts
        self.direction = direction

    def grow(self, update: RegionsUpdate) -> None:
        """Add published regions. Raises WireError when an update was lost in between."""
        if update.generation != self.regions.generation + 1:
            raise WireError(
                f"{self.name}: regions of generation {update.generation} "
                f"follow {self.regions.generation}"
            )
        self.regions = self.regions.add(update.regions)


def agree(ours: WorkerFacts, theirs: WorkerFacts) -> Direction:
    """The direction for a pair whose KV may flow; both sides compute the same answer.

    Raises HandshakeRejected naming the first field that differs.
    """
    same: list[tuple[str, object, object]] = [
        ("model", ours.model, theirs.model),
        ("connector", ours.connector, theirs.connector),
    ]
    spec, other = ours.geometry.spec, theirs.geometry.spec
    for name in ("num_layers", "num_kv_heads", "head_dim_k", "head_dim_v", "dtype", "block_size"):
        same.append((name, getattr(spec, name), getattr(other, name)))
    for name, mine, yours in same:
        if mine != yours:
            raise HandshakeRejected(name, mine, yours)
    if {ours.role, theirs.role} != {"prefill", "decode"}:
        raise HandshakeRejected("role", ours.role, theirs.role)
    return choose_direction(ours.lane, theirs.lane, (ours.device, theirs.device))
