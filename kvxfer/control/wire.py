"""All bytes on the wire: typed messages, msgpack, bounded. No pickle, no strings to split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvxfer.control.messages import WIRE_VERSION, Hello, Message
from kvxfer.errors import KvxferError, WireError

MAX_MESSAGE_BYTES = 16 << 20
"""A Hello with 100,000 regions is about 6 MB."""
MAX_BATCH = 64
"""Messages in a frame; what waits for one peer is bounded by frames (`channel.MAX_QUEUED`)."""
_BATCH = b"\xdc"
"""How a msgpack array of 16-bit length begins; no message does."""


class _AnyHello(msgspec.Struct, tag="Hello"):
    """What every version's Hello has."""

    wire_version: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
_batch_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(
    Annotated[list[Message], msgspec.Meta(min_length=2, max_length=MAX_BATCH)]
)
_any_hello = msgspec.msgpack.Decoder(_AnyHello)


def encode(message: Message) -> bytes:
    """Raises WireError for a message larger than what a receiver takes."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}"
        )
    return data


def join(messages: Sequence[bytes]) -> bytes:
    """A frame of encoded messages: one as it is, up to MAX_BATCH as an array."""
    if len(messages) == 1:
        return messages[0]
    return b"".join((_BATCH, len(messages).to_bytes(2, "big"), *messages))


def decode_frame(data: bytes) -> list[Message]:
    """One message or a batch of them; as `decode`."""
    if data[:1] != _BATCH:
        return [decode(data)]
    _check_size(data)
    try:
        return _batch_decoder.decode(data)
    except (msgspec.MsgspecError, KvxferError, RecursionError, OverflowError) as error:
        raise WireError(f"not a batch of wire version {WIRE_VERSION}: {error}") from error


def _check_size(data: bytes) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")


def decode(data: bytes) -> Message:
    """Raises WireError on anything that is not exactly one well-formed message of this version.

    A Hello of another version decodes to a Hello without facts, so that it can be refused by name.
    """
    _check_size(data)
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
