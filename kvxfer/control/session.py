"""Peers: who they are, what they have registered, and when they were last heard of.

| state    | meaning                                             | leaves by |
| ---      | ---                                                 | --- |
| GREETING | Hello is out, or its regions are being loaded       | loaded → MET |
| MET      | it is known; lanes may have to be tried out first   | a lane → READY |
| READY    | its regions are known to the connector              | silence, Goodbye → GONE |
| GONE     | fenced off: nothing is sent to it or believed of it | a new Hello → GREETING |
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.cache.layout import MAX_ADDRESSES
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.cache_messages import RegionsRevoke
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import RegionsUpdate
from kvxfer.errors import HandshakeRejected, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lane_costs import LaneCosts, cheapest
from kvxfer.transfer.lanes import Lane, LaneSide, candidates
from kvxfer.transfer.rank_plans import RankMove, total_heads
from kvxfer.transfer.regions import Region, RegionSet

MAX_RANKS = 8
"""Of one worker: a host's GPUs. Whoever dials does not know how many the other has."""


class PeerState(enum.Enum):
    GREETING = enum.auto()
    MET = enum.auto()
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
    lanes: tuple[Lane, ...] = ()
    """Those that may work, best first as far as that is known without trying."""
    reached: frozenset[str] = frozenset()
    """Connectors of ours that know it."""
    lane: Lane | None = None
    """The one in use: the first, until another one was chosen."""
    lane_gbps: float = 0.0
    """As measured when it was chosen; 0 where it was not."""
    lane_costs: LaneCosts = field(default_factory=dict)
    """Of the lanes that proved to work, as far as we start transfers; none where none was tried."""
    met_s: float = 0.0
    regions: RegionSet = field(default_factory=RegionSet)
    hello_sent_s: float = 0.0
    """When we, who dialled, last greeted it; 0 when we did not."""
    acked_generation: int = 0
    """The newest of our generations that it has loaded."""

    @property
    def name(self) -> str:
        return self.facts.worker_id if self.facts else self.key

    @property
    def knows_us(self) -> bool:
        """Whether it knows, or is about to know, what we have registered."""
        greeted = self.state is PeerState.GREETING and self.hello_sent_s > 0
        return greeted or (self.is_met and self.facts is not None)

    @property
    def is_met(self) -> bool:
        """Whether it has loaded our regions and we its."""
        return self.state in (PeerState.MET, PeerState.READY)

    @property
    def direction(self) -> Direction | None:
        return self.lane.direction if self.lane else None

    def lane_for(self, settled: Lane, moves: Sequence[RankMove]) -> Lane:
        """The lane of the direction that was `settled` on by which `moves` cost least."""
        return cheapest(settled, self.lane_costs, self.reached, [move.plan for move in moves])

    def learn(self, facts: WorkerFacts, lanes: Sequence[Lane]) -> None:
        """Take over what Hello or Welcome said. Raises RegionError or WireError on bad regions."""
        for rank in facts.ranks:
            if not 0 <= rank.base_address < MAX_ADDRESSES:
                raise WireError(f"{facts.worker_id}: base address {rank.base_address:#x}")
        _check_inside(facts, facts.regions)
        self.regions = RegionSet(tuple(facts.regions), facts.generation)
        self.facts = facts
        self.lanes = tuple(lanes)
        if self.lane not in self.lanes:
            self.lane = self.lanes[0]

    def grow(self, update: RegionsUpdate) -> None:
        """Add published regions. Raises WireError when an update was lost in between, or a region
        lies outside the peer's cache."""
        assert self.facts is not None
        _check_inside(self.facts, update.regions)
        if update.generation != self.regions.generation + 1:
            raise WireError(
                f"{self.name}: regions of generation {update.generation} "
                f"follow {self.regions.generation}"
            )
        self.regions = self.regions.add(update.regions)

    def described(self, descriptions: Sequence[bytes]) -> list[RankFacts]:
        """The peer's ranks, described afresh. Raises WireError unless there is one for each."""
        assert self.facts is not None
        ranks = self.facts.ranks
        if len(descriptions) != len(ranks):
            raise WireError(f"{self.name}: {len(descriptions)} descriptions for {len(ranks)} ranks")
        pairs = zip(ranks, descriptions, strict=True)
        return [RankFacts(rank.base_address, told, rank.invitations) for rank, told in pairs]

    def drop(self, revoke: RegionsRevoke) -> list[int]:
        """Remove revoked regions; returns, group by group, the lowest block that may lie in one of
        them (the capacity: none). Raises RegionError for regions that the peer does not have."""
        assert self.facts is not None
        self.regions = self.regions.remove(revoke.regions)
        lowest = []
        for group in self.facts.geometry.groups:
            inside = [r for r in revoke.regions if r.offset < group.end and r.end > group.offset]
            blocks = (group.lowest_block(region.offset, region.end) for region in inside)
            lowest.append(min(blocks, default=group.capacity_blocks))
        return lowest


def _check_inside(facts: WorkerFacts, regions: Sequence[Region]) -> None:
    """Offsets index int64 arrays later on: a peer's must not get there unchecked."""
    total_bytes = facts.geometry.total_bytes
    for region in regions:
        if region.end > total_bytes:
            raise WireError(f"{facts.worker_id}: {region} ends beyond its {total_bytes} bytes")


def agree(ours: WorkerFacts, theirs: WorkerFacts) -> list[Lane]:
    """The lanes of a pair whose KV may flow, as `candidates`; both sides get the same answer.

    Raises HandshakeRejected naming the first field that differs.
    """
    for facts in (ours, theirs):
        if not 1 <= facts.tensor_parallel_size <= MAX_RANKS:
            sizes = ours.tensor_parallel_size, theirs.tensor_parallel_size
            raise HandshakeRejected("tensor_parallel_size", *sizes)
    same: list[tuple[str, object, object]] = [("model", ours.model, theirs.model)]
    specs, others = ours.geometry.specs, theirs.geometry.specs
    same.append(("groups", len(specs), len(others)))
    for index, (spec, other) in enumerate(zip(specs, others, strict=False)):
        where = f" of group {index}" if len(specs) > 1 else ""
        for name in (one.name for one in dataclasses.fields(spec)):
            if name == "num_kv_heads":
                same.append(_heads(ours, theirs, spec, other, where))
            elif name != "replicas":
                same.append((f"{name}{where}", getattr(spec, name), getattr(other, name)))
    for name, mine, yours in same:
        if mine != yours and not (name.startswith("block_size") and _divides(mine, yours)):
            raise HandshakeRejected(name, mine, yours)
    if {ours.role, theirs.role} != {"prefill", "decode"}:
        raise HandshakeRejected("role", ours.role, theirs.role)
    return candidates(_side(ours), _side(theirs))


def _heads(
    ours: WorkerFacts, theirs: WorkerFacts, spec: KVCacheSpec, other: KVCacheSpec, where: str
) -> tuple[str, object, object]:
    """KV heads of the whole model, or the sizes where those cannot both cut it. Raises
    HandshakeRejected for replicas that no worker of its size can have."""
    sizes = ours.tensor_parallel_size, theirs.tensor_parallel_size
    if sizes[0] % spec.replicas or sizes[1] % other.replicas:
        raise HandshakeRejected(f"replicas{where}", spec.replicas, other.replicas)
    mine, yours = total_heads(spec, sizes[0]), total_heads(other, sizes[1])
    fits = _divides(mine, sizes[1]) and _divides(yours, sizes[0])
    if mine != yours and sizes[0] != sizes[1] and not fits:
        return "tensor_parallel_size", *sizes
    return f"num_kv_heads{where}", mine, yours


def _divides(mine: object, yours: object) -> bool:
    """Blocks of two sizes go into one another."""
    sizes = [size for size in (mine, yours) if isinstance(size, int)]
    return len(sizes) == 2 and max(sizes) % min(sizes) == 0


def _side(facts: WorkerFacts) -> LaneSide:
    """Raises WireError for what is no lane."""
    return LaneSide(tuple(map(Lane.parse, facts.lanes)), facts.host, facts.device)
