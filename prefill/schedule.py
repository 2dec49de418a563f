"""What a prefill worker computes next: jobs in order of arrival, each in chunks.

| state        | what happens                                           | leaves by               |
| ---          | ---                                                    | ---                     |
| WAITING      | queued; holds no blocks                                | blocks free → COMPUTING |
| COMPUTING    | what was cached is handed over; chunks of the rest are | last one → HANDING_OVER |
|              | computed, and handed over as they finish               |                         |
| HANDING_OVER | push: writes in flight; pull: reads under the lease    | proved complete → ENDED |
|              |                                                        | all: given up → ENDING  |
| ENDING       | given up; a chunk or writes of ours are not over yet   | they are over → ENDED   |
| ENDED        | blocks are free; the other side was told               |                         |

WAITING to HANDING_OVER have the grant's deadline, and leave for ENDING by it, by Abort, with the
peer, and by a failure. ENDING has that of the transport, whose transfers are never abandoned: what
makes no progress costs the peer its session (`transfer_timeout_s`).

A grant, as prefill sees it, and a lease, which is its other side where decode pulls:

| grant   | lease  | means                                   | its last word                       |
| ---     | ---    | ---                                     | ---                                 |
| unknown | none   | no request for it came                  | GrantUnknown; to Abort: Aborted,    |
|         |        |                                         | and a request that comes is void    |
| used    | held   | WAITING to HANDING_OVER; blocks of ours | Done, Confirmed → over; a failure,  |
|         |        | that were offered stay as they are      | a deadline, a loss → broken         |
| broken  | broken | ENDING                                  | Failed; to Abort: Aborted → over    |
| over    | over   | ENDED: its last word is remembered      | the same, to whoever asks again     |
|         |        |                                         | (`prefill.last_words`)              |
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.cache.footprint import blocks_needed, prompt_chunks
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.prefix_cache import PrefixCache
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.control.messages import PrefillRequest, TransferStats
from kvxfer.control.session import Peer
from kvxfer.model.runner import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.rank_plans import RankPlans


class JobState(enum.Enum):
    WAITING = enum.auto()
    COMPUTING = enum.auto()
    HANDING_OVER = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


@dataclass
class PrefillJob:
    """One request of one decode worker."""

    request: PrefillRequest
    peer: Peer
    deadline_s: float
    state: JobState = JobState.WAITING
    blocks: list[list[int]] = field(default_factory=list)
    """Group by group; the first ones may be those of other jobs, or cached."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the prompt's whole blocks; empty where none are cached."""
    num_cached: int = 0
    """Tokens whose KV was in our cache when it began."""
    layers_sent: list[int] = field(default_factory=list)
    """Of the chunk that is being computed, layers handed over already, group by group."""
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


class PrefillScheduler:
    """First come, first served; one job computes at a time. Control thread only."""

    def __init__(
        self,
        pools: BlockPools,
        chunk_tokens: int,
        specs: Sequence[KVCacheSpec],
        prefix_cache: PrefixCache,
    ) -> None:
        self._pools = pools
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._specs = specs
        self._waiting: deque[PrefillJob] = deque()
        self.current: PrefillJob | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: PrefillJob) -> None:
        job.hashes = self._prefix_cache.hashes(job.request.tokens)
        self._waiting.append(job)

    def remove(self, job: PrefillJob) -> None:
        """Drop a job that is given up: it is computed no further."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self.current is job:
            self.current = None

    def wanted_blocks(self) -> list[int]:
        """Blocks of each group that the job at the front waits for; empty if it can start."""
        if self.current is not None or not self._waiting:
            return []
        job = self._waiting[0]
        cost = self._prefix_cache.cost(self._needed(job), self._prefix(job))
        return [] if self._pools.can_allocate(cost) else cost

    def next_chunk(self) -> tuple[PrefillJob, SequenceStep] | None:
        """The next chunk to compute; a waiting job gets its blocks here, when it can."""
        if self.current is None and self._waiting:
            if not self._start(self._waiting[0]):
                return None
            self._waiting.popleft()
        if self.current is None or self.current.chunk_running:
            return None
        return self.current, self._chunk(self.current)

    def _start(self, job: PrefillJob) -> bool:
        """Whether there are blocks for it."""
        needed, prefix = self._needed(job), self._prefix(job)
        if not self._pools.can_allocate(self._prefix_cache.cost(needed, prefix)):
            return False
        job.blocks = self._prefix_cache.allocate(needed, prefix)
        job.num_cached = len(prefix[0]) * self._specs[0].block_size
        job.computed = job.num_cached
        self._prefix_cache.count(len(job.request.tokens), job.num_cached)
        job.state = JobState.COMPUTING
        self.current = job
        return True

    def finish_chunk(self, job: PrefillJob, step: SequenceStep, token: int | None) -> range:
        """Account for a computed chunk; returns the tokens it added."""
        job.chunk_running = False
        start, job.computed = job.computed, step.start + len(step.tokens)
        self._prefix_cache.insert(job.hashes, job.blocks, range(start, job.computed))
        if job.computed == len(job.request.tokens):
            job.first_token = token
            if job.state is JobState.COMPUTING:
                job.state = JobState.HANDING_OVER
            self.remove(job)
        return range(start, job.computed)

    def _needed(self, job: PrefillJob) -> list[int]:
        return blocks_needed(self._specs, len(job.request.tokens), 0, self._chunk_tokens)

    def _prefix(self, job: PrefillJob) -> list[list[int]]:
        return self._prefix_cache.lookup(job.hashes, len(job.request.tokens))

    def _chunk(self, job: PrefillJob) -> SequenceStep:
        """The next tokens, up to where a chunk ends that begins with the prompt, cached or not: so
        that as few bits as can be depend on what was cached."""
        tokens = job.request.tokens
        chunks = prompt_chunks(self._specs, len(tokens), self._chunk_tokens)
        stop = chunks[job.computed // len(chunks[0])].stop
        sampling = job.request.sampling
        spec = SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
        return SequenceStep(
            tokens=tokens[job.computed : stop],
            start=job.computed,
            tables=[BlockTable(blocks) for blocks in job.blocks],
            sample=spec if stop == len(tokens) else None,
        )
