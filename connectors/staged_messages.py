"""What two ends of the staged way tell each other, in NIXL notifications.

    Greeting    "this is my ring, and the number of my session; of yours I know …"
    Ping        "are you there?", and its answer
    Bye         "I forgot you: nothing of yours is in use here, and nothing here is yours"
    pull        Ask (a piece, and the slot to write it into)  →  Written | Refused
    push        Offer (so many pieces are to come)  →  Grant (a slot) for each
                Grant  →  Piece (it is in the slot, and belongs there) | Return
                Piece  →  Landed

Ask, Grant and Piece are each answered once, whatever happens: so a slot has one owner at any time,
and who has asked knows when nobody touches its memory any more. All but Greeting carry the session
that the receiver has with the sender; what belongs to an earlier one is ignored. A notification
carries several, in order: all that there is to say to a peer after a turn.

A notification is no proof of anything: all that is in one is checked before it is used, against
what was asked, the ring, and the regions that are registered here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from connectors.staging_plan import MAX_BOXES, MAX_STARTS, Nest
from kvxfer.errors import ConnectorError

MAX_MESSAGE_BYTES = 256 << 10
"""Of a notification. The largest message is a Piece or an Ask: 8 bytes a start and some 100 a
box."""
MAX_SLOTS = 4096
MAX_TEXT = 512
_MAX_AXES = 8

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Stride = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Session = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Ticket = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Starts = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MAX_STARTS)]
_Extents = Annotated[tuple[_Positive, ...], msgspec.Meta(max_length=_MAX_AXES)]
_Strides = Annotated[tuple[_Stride, ...], msgspec.Meta(max_length=_MAX_AXES)]


class WireNest(msgspec.Struct, frozen=True, array_like=True):
    """A `Nest`; starts are int64, little-endian."""

    starts: _Starts
    extents: _Extents
    strides: _Strides
    run_bytes: _Positive


_Nests = Annotated[tuple[WireNest, ...], msgspec.Meta(min_length=1, max_length=MAX_BOXES)]


class Ring(msgspec.Struct, frozen=True):
    """Memory of one end: `num_slots` that it sends from, then as many that it receives in."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    base_address: _Session
    slot_bytes: _Positive
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=64 << 10)] = b""
    """NIXL's."""

    def outgoing(self, slot: int) -> int:
        """Offset of a slot, in bytes."""
        return slot * self.slot_bytes

    def incoming(self, slot: int) -> int:
        return (self.num_slots + slot) * self.slot_bytes

    @property
    def share(self) -> int:
        """How many slots, in a direction, one peer may hold at a time."""
        return max(1, self.num_slots * 3 // 4)

    @property
    def total_bytes(self) -> int:
        return 2 * self.num_slots * self.slot_bytes


class Greeting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    session: _Session
    """The sender's, of this connection."""
    to: _Session
    """The receiver's, or 0: the sender does not know it yet and wants to be told."""
    ring: Annotated[bytes, msgspec.Meta(max_length=128 << 10)]
    """A sealed Ring."""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    to: _Session
    is_answer: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    to: _Session


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of the destination's ticket."""

    to: _Session
    ticket: _Ticket
    slot: _Count
    """The destination's, incoming."""
    size_bytes: _Positive
    sources: _Nests


class Written(msgspec.Struct, frozen=True, tag=True, array_like=True):
    to: _Session
    ticket: _Ticket
    slot: _Count


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The piece will not come, and nothing more is written into the slot."""

    to: _Session
    ticket: _Ticket
    slot: _Count
    error: _Text


class Offer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of the source's ticket."""

    to: _Session
    ticket: _Ticket
    num_pieces: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Grant(msgspec.Struct, frozen=True, tag=True, array_like=True):
    to: _Session
    ticket: _Ticket
    slot: _Count
    """The destination's, incoming: the source may write one piece into it."""


class Piece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    to: _Session
    ticket: _Ticket
    slot: _Count
    size_bytes: _Positive
    destinations: _Nests


class Return(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The slot is not needed, nor is any other for this ticket."""

    to: _Session
    ticket: _Ticket
    slot: _Count


class Landed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The piece that was in the slot is where it belongs, or, with an error, nowhere."""

    to: _Session
    ticket: _Ticket
    slot: _Count
    error: _Text = ""


SlotMessage: TypeAlias = Ask | Written | Refused | Offer | Grant | Piece | Return | Landed
Message: TypeAlias = Greeting | Ping | Bye | SlotMessage
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])


def encode(*messages: Message) -> bytes:
    """A notification."""
    return _encoder.encode(messages)


def notifications(messages: Sequence[Message]) -> Iterator[bytes]:
    """A few that hold `messages`, in order; none is too large, unless one message is."""
    data = encode(*messages)
    if len(data) <= MAX_MESSAGE_BYTES or len(messages) == 1:
        yield data
        return
    middle = len(messages) // 2
    yield from notifications(messages[:middle])
    yield from notifications(messages[middle:])


def decode(data: bytes) -> list[Message]:
    """What a notification says. Raises ConnectorError where any of it is no message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ConnectorError(f"a notification of {len(data)} bytes, over {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConnectorError(f"no message of the staged way: {error}") from error


def to_wire(nests: Iterable[Nest]) -> tuple[WireNest, ...]:
    return tuple(
        WireNest(nest.starts.astype("<i8").tobytes(), nest.extents, nest.strides, nest.run_bytes)
        for nest in nests
    )


def from_wire(nests: Iterable[WireNest], size_bytes: int, window_bytes: int) -> tuple[Nest, ...]:
    """The nests of a message, which together are `size_bytes` and lie in [0, window_bytes).

    Raises ConnectorError unless they do. Of regions nothing is known here.
    """
    found = tuple(_nest(nest, window_bytes) for nest in nests)
    total = sum(nest.total_bytes for nest in found)
    if total != size_bytes:
        raise ConnectorError(f"size_bytes: {size_bytes}, but the runs hold {total}")
    return found


def _nest(wire: WireNest, window_bytes: int) -> Nest:
    if len(wire.starts) % 8:
        raise ConnectorError(f"starts: {len(wire.starts)} bytes are no int64 column")
    if len(wire.extents) != len(wire.strides):
        raise ConnectorError(f"strides: {wire.strides} do not fit extents {wire.extents}")
    if math.prod(wire.extents) * wire.run_bytes > window_bytes:
        raise ConnectorError(f"extents: {wire.extents} of {wire.run_bytes} bytes are too many")
    starts = np.frombuffer(wire.starts, dtype="<i8").astype(np.int64)
    axes = [(e - 1) * s for e, s in zip(wire.extents, wire.strides, strict=True)]
    lowest = int(starts.min()) + sum(step for step in axes if step < 0)
    end = int(starts.max()) + sum(step for step in axes if step > 0) + wire.run_bytes
    if lowest < 0 or end > window_bytes:
        raise ConnectorError(f"starts: bytes [{lowest}, {end}) leave [0, {window_bytes})")
    return Nest(starts, wire.extents, wire.strides, wire.run_bytes)
