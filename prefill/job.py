"""A prefill job, and the states that it goes through.

| state        | what happens                                         | leaves by               |
| ---          | ---                                                  | ---                     |
| QUEUED       | waits for its turn; nobody holds blocks for it       | near: Starting → CALLED |
| CALLED       | decode was asked for blocks to write to              | Granted → WAITING       |
| WAITING      | has decode's blocks, of ours none                    | its turn → COMPUTING    |
| COMPUTING    | what was cached is handed over; chunks of the rest   | last one → HANDING_OVER |
|              | are computed, and handed over as they finish: of     |                         |
|              | both, what decode has not                            |                         |
| HANDING_OVER | push: writes in flight; pull: reads under the lease  | proved complete → ENDED |
|              |                                                      | all: given up → ENDING  |
| ENDING       | given up; a chunk or writes of ours are not over yet | they are over → ENDED   |
| ENDED        | blocks are free; the other side was told             |                         |

One that comes with blocks begins in WAITING, one without in QUEUED; one that the queue has no room
for is answered Busy and never becomes a job. QUEUED to HANDING_OVER have the grant's deadline, and
leave for ENDING by it, by Abort, with the peer, and by a failure. ENDING has that of the transport,
whose transfers are never abandoned: what makes no progress costs the peer its session
(`transfer_timeout_s`).

A grant, as prefill sees it, and a lease, which is its other side where decode pulls:

| grant   | lease  | means                                   | its last word                       |
| ---     | ---    | ---                                     | ---                                 |
| unknown | none   | no request for it came                  | GrantUnknown; to Abort: Aborted,    |
|         |        |                                         | and a request that comes is void    |
| asked   | none   | QUEUED, CALLED: without blocks; who     | a failure, a deadline, a loss →     |
|         |        | asks about one called is called again   | broken                              |
| used    | held   | WAITING to HANDING_OVER; blocks of ours | Done, Confirmed → over; a failure,  |
|         |        | that were offered stay as they are      | a deadline, a loss → broken         |
| broken  | broken | ENDING                                  | Failed; to Abort: Aborted → over    |
| over    | over   | ENDED, or Busy: its last word is        | the same, to whoever asks again     |
|         |        | remembered                              | (`prefill.last_words`)              |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvxfer.control.messages import PrefillRequest
from kvxfer.control.router_messages import TransferStats
from kvxfer.control.session import Peer
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.rank_plans import RankPlans


class JobState(enum.Enum):
    QUEUED = enum.auto()
    CALLED = enum.auto()
    WAITING = enum.auto()
    COMPUTING = enum.auto()
    HANDING_OVER = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


NOT_STARTED = (JobState.QUEUED, JobState.CALLED, JobState.WAITING)


@dataclass
class PrefillJob:
    """One request of one decode worker."""

    request: PrefillRequest
    peer: Peer
    deadline_s: float
    state: JobState = JobState.QUEUED
    granted: list[list[int]] = field(default_factory=list)
    """Decode's blocks, once they are named."""
    handed_from: int = 0
    """Tokens that decode has: what is handed over begins behind them, wherever our blocks end."""
    blocks: list[list[int]] = field(default_factory=list)
    """Group by group; the first ones may be those of other jobs, or cached."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the prompt's whole blocks; empty where none are cached."""
    num_cached: int = 0
    """Tokens whose KV was in our cache when it began."""
    layers_sent: list[int] = field(default_factory=list)
    """Of the chunk that is being computed, layers handed over already, group by group."""
    is_started: bool = False
    computed: int = 0
    """Tokens whose KV is in our cache."""
    first_token: int | None = None
    chunk_running: bool = False
    moves_in_flight: int = 0
    plans: RankPlans | None = None
    """Push: of `planned_tokens`, all layers, of which some leave at a time."""
    planned_tokens: range = range(0)
    num_ranks_reached: int = 0
    """Push: ranks of the peer that each piece was planned for."""
    digest: int | None = None
    digest_running: bool = False
    is_taken: bool = False
    """Pull: decode has read everything."""
    stats: TransferStats = field(default_factory=TransferStats)
    failure: str = ""
    """Why it was given up; told to decode once nothing of ours is under way any more."""
    lane: Lane | None = None
    """By which its KV flows: the last piece did; its direction stays to the end."""
    aborted: bool = False
    """Decode gave it up and is owed an Aborted."""

    def __post_init__(self) -> None:
        self.lane = self.peer.lane
        grant = self.request.grant
        if grant.blocks is not None:
            self.bind(grant.blocks, grant.num_cached_tokens)

    def bind(self, blocks: list[list[int]], num_cached_tokens: int) -> None:
        """The grant is of these blocks, of what follows so many tokens: it may start."""
        self.granted, self.handed_from = blocks, num_cached_tokens
        self.state = JobState.WAITING

    @property
    def handed_over(self) -> range:
        """The prompt's tokens whose KV decode gets."""
        return range(self.handed_from, len(self.request.tokens))

    @property
    def direction(self) -> Direction | None:
        return self.lane.direction if self.lane else None

    @property
    def is_pushed(self) -> bool:
        return self.direction is Direction.PUSH

    @property
    def key(self) -> tuple[str, str]:
        """A request id is a router's, who may use it again; a grant is used once."""
        return self.peer.key, self.request.grant.grant_id

    @property
    def is_quiet(self) -> bool:
        """Neither the model nor the connectors work for it."""
        busy = self.chunk_running or self.digest_running
        return not busy and self.moves_in_flight == 0
