"""What consumers and producers tell each other, one rank to another.

| direction           | message             | about |
| ---                 | ---                 | --- |
| consumer → producer | Hello               | who we are |
| producer → consumer | Welcome, Reject     | how to reach its KV; why that may not flow |
| both                | Heartbeat           | still there |
| producer → consumer | Leave, Unknown      | its memory is to go; who are you? |
| consumer → producer | Goodbye             | nothing here touches it any more |
| consumer → producer | Claim               | the KV of a request: hold it for us |
| producer → consumer | Ready               | where it is |
| consumer → producer | Taken, Abort        | all of it was read; nothing of it is, or will be |
| producer → consumer | Confirmed, Failed   | what was read is valid; it must not be used |

msgpack, bounded, refused whole where anything is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvxfer.control.channel import Codec
from kvxfer.control.wire import MAX_MESSAGE_BYTES
from kvxfer.errors import HandshakeRejected, KvxferError, WireError

WIRE_VERSION = 1

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Block = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class _Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    pass


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an engine; what has to be the same on both sides for KV to flow."""

    engine_id: Name
    incarnation: Name
    """Of the process: another one for each life."""
    rank: Rank
    size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Of the engine's tensor parallelism."""
    model: Name
    page_format: Name
    """How K and V lie within a block: `layout.page_format`."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    """Tokens in one of the endpoint's blocks."""
    layers: list[list[str]]
    """Names, group by group."""

    @property
    def name(self) -> str:
        """What the endpoints call this life of the rank."""
        return f"{self.engine_id}/{self.rank}/{self.incarnation}"


class Hello(_Message, frozen=True):
    wire_version: int
    facts: Facts


class Welcome(_Message, frozen=True):
    wire_version: int
    facts: Facts
    description: bytes
    """`Endpoint.describe`."""


class Reject(_Message, frozen=True):
    field: str
    ours: str
    theirs: str


class Heartbeat(_Message, frozen=True):
    pass


class Leave(_Message, frozen=True):
    reason: str


class Unknown(_Message, frozen=True):
    pass


class Goodbye(_Message, frozen=True):
    acknowledgement: bytes
    """`Endpoint.disconnect`; b'' from one that never connected."""


class Claim(_Message, frozen=True):
    lease_id: Name
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Ranks of the consumer that claim it at this rank of the producer, this one included."""


class Ready(_Message, frozen=True):
    lease_id: Name
    num_tokens: Count
    blocks: list[list[Block]]
    """Group by group, from token 0 on, in blocks of the endpoint's size; 0: there is none any
    more."""


class Taken(_Message, frozen=True):
    lease_id: Name


class Abort(_Message, frozen=True):
    lease_id: Name


class Confirmed(_Message, frozen=True):
    lease_id: Name


class Failed(_Message, frozen=True):
    lease_id: Name
    reason: str


Message = (
    Hello
    | Welcome
    | Reject
    | Heartbeat
    | Leave
    | Unknown
    | Goodbye
    | Claim
    | Ready
    | Taken
    | Abort
    | Confirmed
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Raises WireError for a message larger than what a receiver takes."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} of {len(data)} bytes is too large")
    return data


def decode_frame(data: bytes) -> list[Message]:
    """Raises WireError for anything that is not exactly one message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        return [_decoder.decode(data)]
    except (msgspec.MsgspecError, KvxferError, RecursionError, OverflowError) as error:
        raise WireError(f"no message of the vLLM connector, version 1: {error}") from error


CODEC = Codec(encode, decode_frame)


def check_same(ours: Facts, theirs: Facts) -> None:
    """Raise HandshakeRejected, which names the field, where KV cannot flow between two engines.

    What the endpoints check themselves (heads, head sizes, dtype, block size) is not looked at.
    """
    for field in ("model", "page_format", "layers"):
        mine, yours = getattr(ours, field), getattr(theirs, field)
        if mine != yours:
            raise HandshakeRejected(field, mine, yours)
