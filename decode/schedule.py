"""What a decode worker computes next: one token for every sequence that runs.

| request  | what happens                                    | leaves by                       |
| ---      | ---                                             | ---                             |
| WAITING  | queued here; no prefill for it is there         | asked → ASKED; at once with     |
|          |                                                 | blocks if little was → GRANTED  |
| ASKED    | queued at prefill; nobody holds blocks for it   | Starting → CALLED; failed, Busy |
|          |                                                 | or lost → ENDED, and perhaps    |
|          |                                                 | another attempt, WAITING        |
| CALLED   | prefill is about to start it: it wants blocks   | blocks → GRANTED; else as ASKED |
| GRANTED  | prefill computes and writes, or we read         | complete and proved → FILLED;   |
|          |                                                 | failed → ABORTING, and perhaps  |
|          |                                                 | another attempt, WAITING        |
| FILLED   | the prompt's KV is ours; digests if asked for   | → RUNNING                       |
| RUNNING  | decodes in the batch                            | stop, length, cancel → ENDED    |
| ABORTING | blocks quarantined while the other side, or a   | Aborted, Failed or fenced, and  |
|          | read of ours, may still write                   | our reads over → ENDED          |
| ENDED    | blocks are free                                 |                                 |

WAITING to GRANTED have the request's deadline, which all attempts share; FILLED and RUNNING end
with the model's steps, at most max_new_tokens of them. ABORTING has no deadline, on purpose: blocks
that may still be written to are used for nothing else (`decode.quarantine`). The terminal message
to the router is Finished, once a request: when its last attempt leaves GRANTED for ABORTING, or
when it is ENDED. A prompt that finds the queue full is answered 'overloaded' and never becomes a
request; one that finds the queues of all its attempts full (Busy) ends so.

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
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.rank_plans import RankPlans

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
    ABORTING = enum.auto()
    ENDED = enum.auto()


QUEUED = (RequestState.WAITING, RequestState.ASKED, RequestState.CALLED)
"""Before any blocks."""
AT_PREFILL = (RequestState.ASKED, RequestState.CALLED, RequestState.GRANTED)


@dataclass
class DecodeRequest:
    """One prompt of one router."""

    generate: Generate
    router: str
    deadline_s: float
    state: RequestState = RequestState.WAITING
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
    output: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    retry_after_s: float = 0.0
    """Overloaded: when to ask again."""

    @property
    def direction(self) -> Direction | None:
        return self.lane.direction if self.lane else None

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generate.tokens)

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
        if self.has_first_token and token != self.output[0]:
            raise WireError(
                f"request {self.request_id}: first token {token}, which was {self.output[0]}"
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
        return DecodeRequest(
            self.generate,
            self.router,
            self.deadline_s,
            specs=self.specs,
            attempt=self.attempt + 1,
            tried=self.tried | {self.prefill.key},
            output=list(self.output),
        )

    def why_hopeless(self, now_s: float, refusal: str) -> str:
        """Why to give it up now, or ''; `refusal` is why no prompt is taken at present."""
        if self.state in QUEUED and refusal:
            return refusal
        has_deadline = self.state in QUEUED or self.state is RequestState.GRANTED
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
        )

    def next_step(self) -> SequenceStep:
        """Compute the KV of the newest token and the token after it."""
        position = decoder_start(self.specs, self.num_prompt_tokens) + len(self.output) - 1
        num_encoder = self.num_prompt_tokens if has_encoder(self.specs) else 0
        return SequenceStep(self.output[-1:], position, self.tables, self.sample, num_encoder)

    def finish_reason(self) -> str:
        """stop, length or cancelled once the request has ended, else ''."""
        if self.is_cancelled:
            return "cancelled"
        if self.output and self.output[-1] in self.generate.stop_token_ids:
            return "stop"
        return "length" if len(self.output) >= self.generate.max_new_tokens else ""


class DecodeBatch:
    """The sequences that decode together, at most `max_num_seqs`. Control thread only."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._running: list[DecodeRequest] = []
        self._filled: list[DecodeRequest] = []
        self.is_computing = False

    def join(self, request: DecodeRequest) -> None:
        """A request whose first token is there joins at the next step that has room."""
        self._filled.append(request)

    def leave(self, request: DecodeRequest) -> None:
        for members in (self._running, self._filled):
            if request in members:
                members.remove(request)

    def next_batch(self) -> list[DecodeRequest]:
        """Who takes part in the next step; empty while one is being computed."""
        if self.is_computing:
            return []
        while self._filled and len(self._running) < self._max_num_seqs:
            request = self._filled.pop(0)
            request.state = RequestState.RUNNING
            self._running.append(request)
        return list(self._running)
