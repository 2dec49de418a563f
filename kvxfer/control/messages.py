"""Every message that travels between processes; `control.wire` turns them into bytes and back.

| from → to         | message              | when |
| ---               | ---                  | --- |
| dialer → listener | Hello                | first, and after a reconnect |
| listener → dialer | Welcome or Reject    | the answer |
| any peer          | Heartbeat, Goodbye   | all the time; when it leaves on purpose |
| listener → dialer | HelloWanted          | a heartbeat came from nobody that it knows |
| owner → peers     | RegionsUpdate        | its cache grew |
| peer → owner      | RegionsAck           | the new ranges can be used |
| owner → peers     | RegionsRevoke        | part of its cache is about to go |
| peer → owner      | RegionsRevoked       | nothing of it will be touched any more |
| owner → peers     | RegionsAt            | how far it is, with each heartbeat |
| peer → owner      | RegionsQuery         | an update or revocation was lost |
| owner → peer      | RegionsState         | the answer: all that is registered |
| router → decode   | Generate, Cancel     | a prompt; the client left |
| decode → router   | Token, Finished      | each token; exactly one end |
| decode → prefill  | PrefillRequest       | a prompt, with blocks or without |
| prefill → decode  | Starting, Busy       | its turn is near; the queue is full |
| decode → prefill  | Granted              | the blocks, where none were named |
| prefill → decode  | Done                 | push: all of it is visible |
| prefill → decode  | Ready, Confirmed     | pull: may be read; what was read is valid |
| decode → prefill  | Taken                | pull: everything was read |
| decode → prefill  | Abort                | the request is given up |
| prefill → decode  | Failed, Aborted      | nothing more will be written |
| decode → prefill  | GrantQuery           | nothing was heard of a grant for a while |
| prefill → decode  | GrantUnknown         | it was never heard of; else its last word again |
| decode ↔ prefill  | LaneTrial … Chosen   | see `control.lane_messages` |
| any → worker      | StatusQuery / Status | a look inside |
| router → worker   | ViewQuery / View     | what a picture of it needs, while somebody looks |
| router → worker   | MetricsQuery         | what Prometheus is told |
| worker → router   | Metrics              | the answer |
| router → worker   | Shrink, Sleep,       | what shall become of its cache; |
|                   | WakeUp, Defragment   | each is answered by a CacheState |
| router → worker   | Drain                | take nothing new, finish, leave |
| worker → who is   | Drain                | it takes nothing new itself |
| known to it       |                      | |
| router → decode   | Prefills             | which prefill workers there are |

Promised for all versions: Hello is a map with `type` and `wire_version`, Reject keeps its fields,
and both travel alone; of others, several may travel in one frame (`control.batches`).
"""

from __future__ import annotations

import msgspec

from kvxfer.control.admission_messages import Busy, Granted, Starting
from kvxfer.control.cache_messages import (
    CacheState,
    Defragment,
    RegionsRevoke,
    RegionsRevoked,
    Shrink,
    Sleep,
    WakeUp,
    WireStruct,
)
from kvxfer.control.facts import WorkerFacts
from kvxfer.control.lane_messages import LaneChosen, LanePush, LanePushed, LaneReady, LaneTrial
from kvxfer.control.resync_messages import (
    GrantQuery,
    GrantUnknown,
    HelloWanted,
    RegionsAt,
    RegionsQuery,
    RegionsState,
)
from kvxfer.control.router_messages import (
    Cancel,
    Drain,
    Finished,
    Generate,
    Prefills,
    Sampling,
    Status,
    StatusQuery,
    Token,
    Traceparent,
    TransferStats,
)
from kvxfer.control.telemetry_messages import Metrics, MetricsQuery
from kvxfer.control.view_messages import View, ViewQuery
from kvxfer.transfer.regions import Region

WIRE_VERSION = 9


class Hello(WireStruct, frozen=True):
    wire_version: int
    facts: WorkerFacts | None
    """None from a router, which sends no KV."""


class Welcome(WireStruct, frozen=True):
    wire_version: int
    facts: WorkerFacts
    lane: str
    """The first of the lanes that `candidates` makes of both sides' facts."""


class Reject(WireStruct, frozen=True):
    field: str
    ours: str
    theirs: str


class Heartbeat(WireStruct, frozen=True):
    pass


class Goodbye(WireStruct, frozen=True):
    reason: str
    is_quiet: bool
    """Nothing is under way with whom this is said to, and nothing will be: what it quarantined or
    keeps for the one who leaves is its own again. Answered by a Goodbye that is not: all that was
    said before has arrived then."""


class RegionsUpdate(WireStruct, frozen=True):
    generation: int
    regions: list[Region]
    descriptions: list[bytes]
    """By rank."""
    epoch: int
    """Revocations before it."""


class RegionsAck(WireStruct, frozen=True):
    generation: int


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A single-use right to write into these destination blocks: group by group, those of the
    entries that the prompt's hand-over has to bring (`kvxfer.cache.footprint.prompt_entries`)."""

    grant_id: str
    blocks: list[list[int]] | None
    """None: they are named when prefill is about to start (`Starting`, `Granted`)."""
    timeout_s: float
    num_cached_tokens: int
    """Decode has the KV of so many of the prompt's first tokens, whole blocks and not all of it:
    what is handed over, and named, begins behind them. 0 where no blocks are named."""


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A single-use right to read these source blocks, of the same tokens as the grant's."""

    lease_id: str
    blocks: list[list[int]]
    timeout_s: float


class PrefillRequest(WireStruct, frozen=True):
    request_id: str
    tokens: list[int]
    sampling: Sampling
    grant: Grant
    wants_digest: bool
    """Whether Done or Confirmed shall say what the KV's digest is."""
    traceparent: Traceparent = ""


class Ready(WireStruct, frozen=True):
    """Pull: of the prompt's tokens [start, stop) the KV of `layers` is there, [first, end) in each
    group; `final` says that no more will come."""

    request_id: str
    lease: Lease
    start: int
    stop: int
    layers: list[tuple[int, int]]
    final: bool


class FirstToken(WireStruct, frozen=True):
    """The prompt is computed: what follows it, before its KV has travelled. A hint, which may be
    lost: Done and Confirmed say it too."""

    request_id: str
    grant_id: str
    token: int


class Taken(WireStruct, frozen=True):
    request_id: str
    lease_id: str


class Confirmed(WireStruct, frozen=True):
    """The lease was never broken: what was read is valid."""

    request_id: str
    lease_id: str
    first_token: int
    digest: int | None
    """`kvxfer.transfer.checksum` of all that was handed over."""


class Done(WireStruct, frozen=True):
    """Push: every write of the KV that `num_tokens` tokens of prompt come to, but for the first
    `num_cached_tokens`, of all `num_layers` layers of all groups, is visible in each of `num_ranks`
    ranks."""

    request_id: str
    grant_id: str
    num_tokens: int
    num_cached_tokens: int
    num_layers: int
    num_ranks: int
    first_token: int
    transfer: TransferStats
    digest: int | None
    """As in Confirmed."""


class Abort(WireStruct, frozen=True):
    """Decode gives a grant up; on pull its reads have ended."""

    request_id: str
    grant_id: str
    """A router may use a request id again at once: the grant is what ends."""
    reason: str


class Aborted(WireStruct, frozen=True):
    """Prefill will write nothing more under the grant."""

    request_id: str
    grant_id: str


class Failed(WireStruct, frozen=True):
    """Prefill cannot serve the request and will write nothing more under the grant."""

    request_id: str
    grant_id: str
    reason: str


Message = (
    Hello
    | Welcome
    | Reject
    | Heartbeat
    | Goodbye
    | RegionsUpdate
    | RegionsAck
    | RegionsRevoke
    | RegionsRevoked
    | Generate
    | Cancel
    | Token
    | Finished
    | PrefillRequest
    | Starting
    | Granted
    | Busy
    | Ready
    | FirstToken
    | Taken
    | Confirmed
    | Done
    | Abort
    | Aborted
    | Failed
    | StatusQuery
    | Status
    | MetricsQuery
    | Metrics
    | Shrink
    | Sleep
    | WakeUp
    | Defragment
    | CacheState
    | Drain
    | Prefills
    | ViewQuery
    | View
    | LaneTrial
    | LaneReady
    | LanePush
    | LanePushed
    | LaneChosen
    | HelloWanted
    | RegionsQuery
    | RegionsState
    | RegionsAt
    | GrantQuery
    | GrantUnknown
)
