"""All bytes on the wire: typed messages, msgpack, bounded. No pickle, no strings to split."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxfer.control.messages import WIRE_VERSION, Hello, Message
from kvxfer.errors import KvxferError, WireError

MAX_MESSAGE_BYTES = 16 << 20
"""A Hello with 100,000 regions is about 6 MB."""


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
