"""Peers: who they are, what they have registered, and when they were last heard of.

| peer     | meaning                          | leaves by             | deadline              |
| ---      | ---                              | ---                   | ---                   |
| GREETING | Hello is out, or its regions are | loaded → MET; refused | Hello again, later    |
|          | being loaded                     | → GONE, or our end    | and later             |
| MET      | it is known; lanes may have to   | LaneChosen → READY;   | of the choice → GONE  |
|          | be tried out first               | as READY → GONE       |                       |
| READY    | its regions are known to the     | Goodbye, HelloWanted, | silence, or transfers |
|          | connector: KV may flow           | a wrong word, its new | without progress      |
|          |                                  | incarnation → GONE    | → GONE                |
| GONE     | nothing is sent to it or believed| Hello, Welcome        | we dialled: Hello at  |
|          | of it; what it had is dropped    | → GREETING            | once; else forgotten  |

Who is refused, and when that is our end: see `kvxfer.worker.greeting`.

What is known of a peer's regions is at an (epoch, generation): revocations and additions so far.

| regions  | meaning                          | leaves by             | deadline              |
| ---      | ---                              | ---                   | ---                   |
| LOADING  | known, not yet by the connector  | loaded → IN_STEP, and | the owner's, of the   |
|          |                                  | RegionsAck            | acknowledgement       |
| IN_STEP  | what the owner told last is here | the next update or    | its heartbeats tell   |
|          |                                  | revocation → LOADING; | where it is           |
|          |                                  | one is missing → BEHIND |                     |
| BEHIND   | RegionsQuery is out; nothing but | RegionsState          | asked again at each   |
|          | the answer counts                | → LOADING             | heartbeat             |
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
from kvxfer.control.resync_messages import RegionsState
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
    epoch: int = 0
    """Of its revocations, those that we know of."""
    loaded: tuple[int, int] = (0, 0)
    """The epoch and generation of its regions that our connectors know."""
    asked_s: float = 0.0
    """When we last asked what it has registered."""
    session: int = 0
    """Counts how often it was lost: what was begun in an earlier one is nobody's any more."""
    hello_sent_s: float = 0.0
    """When we, who dialled, last greeted it; 0 when we did not."""
    hello_pause_s: float = 0.0
    """How long it has to answer before it is greeted again."""
    num_hellos: int = 0
    """Since it was last ready."""
    told_epoch: int = 0
    """The oldest of our epochs that it may still know us by, since it was last greeted."""
    refusal: HandshakeRejected | None = None
    """Why KV may not flow, by its word or ours, since it was last ready."""
    acked_generation: int = 0
    """The newest of our generations that it has loaded."""
    is_draining: bool = False
    """By its own word, in this session: nothing new is asked of it."""
    is_unwanted: bool = False
    """No router names it any more: the same, and it is left when nothing is under way with it."""

    @property
    def name(self) -> str:
        return self.facts.worker_id if self.facts else self.key

    @property
    def takes_new(self) -> bool:
        return not (self.is_draining or self.is_unwanted)

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
        told, known = RegionSet(tuple(facts.regions), facts.generation), self.facts
        is_late = known is not None and known.incarnation == facts.incarnation
        if not (is_late and self.knows(facts.epoch, facts.generation)):
            self.regions, self.epoch = told, facts.epoch
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

    def knows(self, epoch: int, generation: int) -> bool:
        """Whether we know as many of its revocations and additions, or more."""
        return epoch <= self.epoch and generation <= self.regions.generation

    def is_next(self, update: RegionsUpdate) -> bool:
        return (update.epoch, update.generation) == (self.epoch, self.regions.generation + 1)

    def can_drop(self, revoke: RegionsRevoke) -> bool:
        """Whether it is the next revocation, of regions that we know."""
        return revoke.epoch == self.epoch + 1 and set(revoke.regions) <= set(self.regions.regions)

    def replace(self, state: RegionsState) -> None:
        """Know all that is registered now. Raises WireError or RegionError on bad regions."""
        assert self.facts is not None
        _check_inside(self.facts, state.regions)
        self.regions = RegionSet(tuple(state.regions), state.generation)
        self.epoch = state.epoch

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
        self.epoch = revoke.epoch
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
    local = frozenset(map(Lane.parse, facts.local_lanes))
    return LaneSide(tuple(map(Lane.parse, facts.lanes)), facts.host, facts.device, local)
