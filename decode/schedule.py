"""What a decode worker computes next: one token for every sequence that runs.

| request   | what happens                                   | leaves by                       |
| ---       | ---                                            | ---                             |
| WAITING   | queued here; no prefill for it is there        | asked → ASKED; at once with     |
|           |                                                | blocks if little was → GRANTED  |
| ASKED     | queued at prefill; nobody holds blocks for it  | Starting → CALLED; failed, Busy |
|           |                                                | or lost → ENDED, and perhaps    |
|           |                                                | another attempt, WAITING        |
| CALLED    | prefill is about to start it: it wants blocks  | blocks → GRANTED; else as ASKED |
| GRANTED   | prefill computes and writes, or we read        | complete and proved → FILLED;   |
|           |                                                | failed → ABORTING, and perhaps  |
|           |                                                | another attempt, WAITING        |
| FILLED    | the prompt's KV is ours; digests if asked for  | → RUNNING; as RUNNING           |
| RUNNING   | decodes in the batch, or sits steps out while  | stop, length, cancel → ENDED;   |
|           | the cache grows for it                         | its blocks go to an older one   |
|           |                                                | → PREEMPTED                     |
| PREEMPTED | first in line for blocks, to be prefilled      | blocks → GRANTED; what fails    |
|           | again with what it said so far                 | there comes back → PREEMPTED    |
| ABORTING  | blocks quarantined while the other side, or a  | Aborted, Failed or fenced, and  |
|           | read of ours, may still write                  | our reads over → ENDED          |
| ENDED     | blocks are free                                |                                 |

WAITING to GRANTED have the request's deadline, which all attempts share; FILLED and RUNNING end
with the model's steps, at most max_new_tokens of them, but for one that sits out: it has a deadline
of the same length. PREEMPTED has one from when nobody runs in front of it any more, and keeps it to
GRANTED (`decode.preemption`). ABORTING has no deadline, on purpose: blocks that may still be
written to are used for nothing else (`decode.quarantine`). The terminal message to the router is
Finished, once a request: when its last attempt leaves GRANTED for ABORTING, or when it is ENDED. A
prompt that finds the queue full is answered 'overloaded' and never becomes a request; one that
finds the queues of all its attempts full (Busy) ends so, unless it was preempted before: it waits.

A grant, as decode sees it, and a lease, its other side where we pull:

| grant  | lease    | means                                     | what is said, and again         |
| ---    | ---      | ---                                       | ---                             |
| asked  | none     | ASKED, CALLED: no blocks are named yet    | PrefillRequest; after a while   |
|        |          |                                           | GrantQuery, later and later     |
| given  | awaited  | nothing of it is here, or a part of it    | the same; Granted, again as     |
|        |          |                                           | often as Starting comes         |
| given  | read     | pull: all was offered, and has been read  | Taken, again as GrantQuery      |
| used   | over     | Done or Confirmed proved: FILLED and on   | nothing: repeats change nothing |
| revoked| broken   | ABORTING                                  | Abort, until it is answered     |
| over   | over     | the writer said so, or is fenced          | a call for it: Abort            |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.cache.footprint import decoder_start, has_encoder, prompt_entries
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.control.router_messages import Finished, Generate, TransferStats
from kvxfer.control.session import Peer
from kvxfer.errors import WireError
from kvxfer.model.runner import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.telemetry.spans import NO_SPAN, Span
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.rank_plans import RankPlans
from kvxfer.worker.trails import TimedState

ASK_PAUSE_S = 1.0
ASK_PAUSE_MAX_S = 8.0
"""Silence about a grant after which decode asks; it doubles up to the maximum."""


class RequestState(enum.Enum):
    WAITING = enum.auto()
    ASKED = enum.auto()
    CALLED = enum.auto()
    GRANTED = enum.auto()
    FILLED = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    ABORTING = enum.auto()
    ENDED = enum.auto()


QUEUED = (
    RequestState.WAITING,
    RequestState.ASKED,
    RequestState.CALLED,
    RequestState.PREEMPTED,
)
"""Before any blocks."""
AT_PREFILL = (RequestState.ASKED, RequestState.CALLED, RequestState.GRANTED)


@dataclass(eq=False)
class DecodeRequest:
    """One prompt of one router."""

    generate: Generate
    router: str
    deadline_s: float
    state: TimedState[RequestState] = TimedState(RequestState.WAITING)  # noqa: RUF009
    specs: Sequence[KVCacheSpec] = ()
    """Of the groups of our cache."""
    blocks: list[list[int]] = field(default_factory=list)
    """Group by group: those of the first `num_cached` tokens, which others may share and nobody
    writes to, then those that are this request's alone."""
    num_cached: int = 0
    """Tokens whose KV was here before: whole blocks, and not all of the prompt."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the prompt's whole blocks; empty where none are cached."""
    prefill: Peer | None = None
    lane: Lane | None = None
    """By which its KV arrives: the last piece did; its direction stays to the end."""
    prefill_name: str = ""
    """That worker's id when it got the grant."""
    grant_id: str = ""
    reads_in_flight: int = 0
    tokens_read: int = 0
    """Pull: tokens [num_cached, tokens_read) were offered and their reads submitted."""
    layers_read: list[int] = field(default_factory=list)
    """Of the tokens that follow those, layers offered already, group by group."""
    stretch_end: int = 0
    """Where those tokens end, while some of their layers are to come."""
    lease_blocks: list[list[int]] = field(default_factory=list)
    """Prefill's, that were offered last."""
    plans: RankPlans | None = None
    """Pull: of `planned_tokens` and those blocks, all layers, of which some come at a time."""
    planned_tokens: range = range(0)
    offer_is_final: bool = False
    attempt: int = 1
    """Counts the prefill workers that it was given to."""
    tried: frozenset[str] = frozenset()
    """Keys of those that it was given to before."""
    has_first_token: bool = False
    """This attempt's prefill told it; `output` may have it from an earlier one."""
    ask_at_s: float = 0.0
    """When to ask again, if nothing is heard of the grant by then."""
    ask_pause_s: float = 0.0
    writer_ended: bool = False
    """Prefill said, or was fenced so, that it writes nothing more for this request."""
    wants_digest: bool = False
    stats: TransferStats = field(default_factory=TransferStats)
    kv_digests: list[str] = field(default_factory=list)
    """Of the prompt's blocks, as they were filled first."""
    output: list[int] = field(default_factory=list)
    arrival: int = 0
    """Counts prompts: of those that run who came last is preempted first. It stays the same."""
    num_resumed: int = 0
    """Tokens of `output` that prefill computes once more with the prompt: all that a preempted
    request had said."""
    can_resume: bool = False
    """Whether it may be preempted; set when it gets blocks, as many as it needs at first then."""
    is_short: bool = False
    """Running: it sits out, until its deadline, for lack of a block."""
    not_before_s: float = 0.0
    """Preempted: when prefill said that it may have room again."""
    is_cancelled: bool = False
    span: Span = NO_SPAN
    """Of all attempts."""
    retry_after_s: float = 0.0
    """Overloaded: when to ask again."""

    @property
    def direction(self) -> Direction | None:
        return self.lane.direction if self.lane else None

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def tokens(self) -> list[int]:
        """What prefill computes: the prompt, and what followed it before it was preempted."""
        return [*self.generate.tokens, *self.output[: self.num_resumed]]

    @property
    def num_prompt_tokens(self) -> int:
        """Of `tokens`."""
        return len(self.generate.tokens) + self.num_resumed

    @property
    def first_token(self) -> int | None:
        """What follows `tokens`, once it was told, by this attempt or an earlier one."""
        told = len(self.output) > self.num_resumed
        return self.output[self.num_resumed] if told else None

    @property
    def sample(self) -> SampleSpec:
        sampling = self.generate.sampling
        return SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(ids) for ids in self.blocks]

    @property
    def shared_blocks(self) -> list[list[int]]:
        """Those of the cached tokens."""
        sizes = [spec.block_size for spec in self.specs]
        return [ids[: self.num_cached // n] for ids, n in zip(self.blocks, sizes, strict=True)]

    @property
    def own_blocks(self) -> list[list[int]]:
        """All others: the prompt's rest, and what decode writes."""
        pairs = zip(self.blocks, self.shared_blocks, strict=True)
        return [ids[len(shared) :] for ids, shared in pairs]

    @property
    def prompt_blocks(self) -> list[list[int]]:
        """Those of what is kept of the prompt's KV, group by group."""
        return self._blocks_from(0)

    @property
    def handed_blocks(self) -> list[list[int]]:
        """Those of them that the hand-over has to fill."""
        return self._blocks_from(self.num_cached)

    def _blocks_from(self, token: int) -> list[list[int]]:
        entries = prompt_entries(self.specs, self.num_prompt_tokens, token)
        return [table.ids(kept) for table, kept in zip(self.tables, entries, strict=True)]

    def is_at(self, peer: Peer) -> bool:
        """Whether `peer` is the worker that was asked, and granted blocks: another one may be at
        its address by now, which cannot speak for it."""
        return self.prefill is peer and peer.name == self.prefill_name

    def check_granted(self, direction: Direction) -> None:
        """Raises WireError unless the grant is being used, and in the agreed direction."""
        if self.state is not RequestState.GRANTED or self.direction != direction:
            raise WireError(
                f"request {self.request_id}: word of a {direction} in state {self.state.name}, "
                f"where the lane is {self.lane}"
            )

    def check_first_token(self, token: int, vocab_size: int) -> None:
        """Raises WireError for a token that prefill cannot mean."""
        if not 0 <= token < vocab_size:
            raise WireError(
                f"request {self.request_id}: token {token} of a vocabulary of {vocab_size}"
            )
        if self.has_first_token and token != self.first_token:
            raise WireError(
                f"request {self.request_id}: first token {token}, which was {self.first_token}"
            )

    def asked(self, now_s: float) -> None:
        """Something was asked: wait for an answer, longer each time."""
        self.ask_pause_s = min(ASK_PAUSE_MAX_S, 2 * self.ask_pause_s or ASK_PAUSE_S)
        self.ask_at_s = now_s + self.ask_pause_s

    def heard(self, now_s: float) -> None:
        """There was word of the grant."""
        self.ask_pause_s = ASK_PAUSE_S
        self.ask_at_s = now_s + ASK_PAUSE_S

    def again(self) -> DecodeRequest:
        """For another prefill worker: nothing of this attempt but what the router was told."""
        assert self.prefill is not None
        tried = self.tried | {self.prefill.key}
        return self._anew(self.deadline_s, self.num_resumed, self.attempt + 1, tried)

    def preempted(self, deadline_s: float) -> DecodeRequest:
        """To be prefilled with all that the router was told, by whichever worker."""
        return self._anew(deadline_s, len(self.output), 1, frozenset())

    def _anew(
        self, deadline_s: float, num_resumed: int, attempt: int, tried: frozenset[str]
    ) -> DecodeRequest:
        return DecodeRequest(
            self.generate,
            self.router,
            deadline_s,
            RequestState.PREEMPTED if num_resumed else RequestState.WAITING,
            specs=self.specs,
            attempt=attempt,
            tried=tried,
            kv_digests=self.kv_digests,
            output=list(self.output),
            span=self.span,
            arrival=self.arrival,
            num_resumed=num_resumed,
        )

    def why_hopeless(self, now_s: float, refusal: str) -> str:
        """Why to give it up now, or ''; `refusal` is why no prompt is taken at present. One that
        was taken is not lost for that: it waits, until its deadline."""
        if self.state in QUEUED and refusal and not self.num_resumed:
            return refusal
        has_deadline = self.state in QUEUED or self.state is RequestState.GRANTED or self.is_short
        is_late = has_deadline and now_s > self.deadline_s
        return f"deadline passed in state {self.state.name}" if is_late else ""

    def finished(self, reason: str, error: str) -> Finished:
        return Finished(
            self.request_id,
            reason,
            error,
            sum(map(len, self.blocks)),
            self.stats,
            self.kv_digests,
            len(self.output),
            self.retry_after_s,
            self.prefill_name,
        )

    def next_step(self) -> SequenceStep:
        """Compute the KV of the newest token and the token after it."""
        start = decoder_start(self.specs, len(self.generate.tokens))
        position = start + len(self.output) - 1
        num_encoder = self.num_prompt_tokens if has_encoder(self.specs) else 0
        return SequenceStep(self.output[-1:], position, self.tables, self.sample, num_encoder)

    def finish_reason(self) -> str:
        """stop, length or cancelled once the request has ended, else ''."""
        if self.is_cancelled:
            return "cancelled"
        if self.output and self.output[-1] in self.generate.stop_token_ids:
            return "stop"
        return "length" if len(self.output) >= self.generate.max_new_tokens else ""
