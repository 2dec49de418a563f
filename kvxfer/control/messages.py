"""All bytes on the wire: typed messages, msgpack, bounded. No pickle, no strings to split.

| from → to         | message              | when |
| ---               | ---                  | --- |
| dialer → listener | Hello                | first, and after a reconnect |
| listener → dialer | Welcome or Reject    | the answer |
| any peer          | Heartbeat, Goodbye   | all the time; when it leaves on purpose |
| owner → peers     | RegionsUpdate        | its cache grew |
| peer → owner      | RegionsAck           | the new ranges can be used |
| router → decode   | Generate, Cancel     | a prompt; the client left |
| decode → router   | Token, Finished      | each token; exactly one end |
| decode → prefill  | PrefillRequest       | blocks are granted |
| prefill → decode  | Done                 | push: all of it is visible |
| prefill → decode  | Ready, Confirmed     | pull: may be read; what was read is valid |
| decode → prefill  | Taken                | pull: everything was read |
| decode → prefill  | Abort                | the request is given up |
| prefill → decode  | Failed, Aborted      | nothing more will be written |
| any → worker      | StatusQuery / Status | a look inside |

Promised for all versions: Hello is a map with `type` and `wire_version`, Reject keeps its fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import KvxferError, WireError
from kvxfer.transfer.regions import Region

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20
"""A Hello with 100,000 regions is about 6 MB."""


class _Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    pass


class WorkerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two workers compare and need of each other before KV may flow."""

    role: str
    worker_id: str
    incarnation: str
    """One life of the process: a restarted worker has another."""
    model: str
    """Fingerprint of config and weights."""
    geometry: CacheGeometry
    base_address: int
    connector: str
    lane: str
    """The direction asked for: push, pull or auto."""
    device: str
    regions: list[Region]
    generation: int
    description: bytes
    """The connector's sealed description of the agent and of `regions`."""


class Hello(_Message, frozen=True):
    wire_version: int
    facts: WorkerFacts | None
    """None from a router, which sends no KV."""


class Welcome(_Message, frozen=True):
    wire_version: int
    facts: WorkerFacts
    direction: str
    """push or pull: what `choose_direction` makes of both sides' facts."""


class Reject(_Message, frozen=True):
    field: str
    ours: str
    theirs: str


class Heartbeat(_Message, frozen=True):
    pass


class Goodbye(_Message, frozen=True):
    reason: str


class RegionsUpdate(_Message, frozen=True):
    generation: int
    regions: list[Region]
    description: bytes


class RegionsAck(_Message, frozen=True):
    generation: int


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's names; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class TransferStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One hand-over, as the side that moved the bytes saw it."""

    num_bytes: int = 0
    num_runs: int = 0
    num_tickets: int = 0
    busy_ns: int = 0
    """Sum over tickets of submitted → complete."""
    start_ns: int = 0
    end_ns: int = 0


class Generate(_Message, frozen=True):
    request_id: str
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: list[int]
    prefill: str
    """worker_id of the prefill worker of the pair; '' lets the decode worker choose."""
    verify: bool
    """Send the digest of each prompt block with Finished."""


class Cancel(_Message, frozen=True):
    request_id: str


class Token(_Message, frozen=True):
    request_id: str
    index: int
    """0 for the first generated token."""
    token: int


class Finished(_Message, frozen=True):
    request_id: str
    reason: str
    """stop, length, cancelled or error."""
    error: str
    num_blocks: int
    transfer: TransferStats
    kv_digests: list[str]


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A single-use right to write into these destination blocks."""

    grant_id: str
    blocks: list[int]
    timeout_s: float


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A single-use right to read these source blocks."""

    lease_id: str
    blocks: list[int]
    timeout_s: float


class PrefillRequest(_Message, frozen=True):
    request_id: str
    tokens: list[int]
    sampling: Sampling
    grant: Grant


class Ready(_Message, frozen=True):
    """Pull: the KV of tokens [start, stop) is there; `final` says that no more will come."""

    request_id: str
    lease: Lease
    start: int
    stop: int
    final: bool


class Taken(_Message, frozen=True):
    request_id: str
    lease_id: str


class Confirmed(_Message, frozen=True):
    """The lease was never broken: what was read is valid."""

    request_id: str
    lease_id: str
    first_token: int


class Done(_Message, frozen=True):
    """Push: every write of tokens [0, num_tokens) of all `num_layers` layers is visible."""

    request_id: str
    grant_id: str
    num_tokens: int
    num_layers: int
    first_token: int
    transfer: TransferStats


class Abort(_Message, frozen=True):
    """Decode gives a grant up; on pull its reads have ended."""

    request_id: str
    grant_id: str
    """A router may use a request id again at once: the grant is what ends."""
    reason: str


class Aborted(_Message, frozen=True):
    """Prefill will write nothing more under the grant."""

    request_id: str
    grant_id: str


class Failed(_Message, frozen=True):
    """Prefill cannot serve the request and will write nothing more under the grant."""

    request_id: str
    grant_id: str
    reason: str


class StatusQuery(_Message, frozen=True):
    pass


class Status(_Message, frozen=True):
    worker_id: str
    values: dict[str, int | float | str]


Message = (
    Hello
    | Welcome
    | Reject
    | Heartbeat
    | Goodbye
    | RegionsUpdate
    | RegionsAck
    | Generate
    | Cancel
    | Token
    | Finished
    | PrefillRequest
    | Ready
    | Taken
    | Confirmed
    | Done
    | Abort
    | Aborted
    | Failed
    | StatusQuery
    | Status
)


class _AnyHello(msgspec.Struct, tag="Hello"):
    """What every version's Hello has."""

    wire_version: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
_any_hello = msgspec.msgpack.Decoder(_AnyHello)


def encode(message: Message) -> bytes:
    """Raises WireError for a message larger than what a receiver takes."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}"
        )
    return data


def decode(data: bytes) -> Message:
    """Raises WireError on anything that is not exactly one well-formed message of this version.

    A Hello of another version decodes to a Hello without facts, so that it can be refused by name.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        message: Message = _decoder.decode(data)
        return message
    except (msgspec.MsgspecError, KvxferError, RecursionError, OverflowError) as error:
        version = _other_version(data)
        if version is not None:
            return Hello(wire_version=version, facts=None)
        raise WireError(f"not a message of wire version {WIRE_VERSION}: {error}") from error


def _other_version(data: bytes) -> int | None:
    """The version of a Hello that is not ours, else None."""
    try:
        version = _any_hello.decode(data).wire_version
    except (msgspec.MsgspecError, RecursionError):
        return None
    return version if version != WIRE_VERSION else None
