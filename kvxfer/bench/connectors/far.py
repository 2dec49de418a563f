"""What travels between two machines that measure together: typed, bounded, nothing pickled.

    who dials                         who listens (the far end: the target)
      Begin ───────────────────────────▶  starts a process of its own for it
      ◀─────────────────────────── Begun
      Call ────────────────────────────▶  asks the process
      ◀────────────────── Result, Failed
      End ─────────────────────────────▶  ends it
      ◀──────────────────────────  Alive ──▶ every ALIVE_S, both ways, while a session is on

They travel in `control.channel`'s sockets, under its rules: without keys on loopback only, with
keys encrypted, and nobody comes in whose key is not known. A peer with a key may have this machine
commit as much memory as it asks for and is free, and move bytes in it: see 'Security' in README.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvxfer.bench.connectors.moves import Aim, Timed
from kvxfer.bench.transfer_words import CacheSetup, Contact
from kvxfer.control.addresses import split_name
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel, Codec
from kvxfer.control.wire import MAX_MESSAGE_BYTES
from kvxfer.errors import KvxferError, UsageError, WireError

VERSION = 1
ALIVE_S = 1.0
SILENCE_S = 15.0
"""Without a word, the other side is lost: a process that registers memory may say nothing for
seconds, but its parent goes on saying Alive."""


class FarStruct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Begin(FarStruct, frozen=True):
    version: int
    device: str
    backend: str
    """Of NIXL. No other setting travels: they belong to whoever started the far end."""


class Begun(FarStruct, frozen=True):
    machine: str
    host: str
    """Where its streams are reached."""


class Busy(FarStruct, frozen=True):
    """Somebody else is served."""


class Alive(FarStruct, frozen=True):
    pass


class End(FarStruct, frozen=True):
    pass


class Call(FarStruct, frozen=True):
    verb: str
    arguments: bytes
    """msgpack of ARGUMENTS[verb]."""


class Result(FarStruct, frozen=True):
    value: bytes
    """msgpack of RESULTS[verb]."""


class Failed(FarStruct, frozen=True):
    error: str
    is_over: bool
    """The process has ended, and with it the session."""


Message = Begin | Begun | Busy | Alive | End | Call | Result | Failed

ARGUMENTS: dict[str, Any] = {
    "open_chunked": tuple[CacheSetup, int],
    "open_connector": tuple[str, dict[str, str]],
    "connect": tuple[Contact],
    "disconnect": tuple[()],
    "close_connector": tuple[()],
    "close": tuple[()],
    "aim": tuple[Aim],
    "wipe": tuple[()],
    "verify": tuple[()],
    "timed": tuple[()],
    "serve": tuple[bool],
    "stream_open": tuple[str],
}
"""Of what may be asked of the far end: nothing else is called."""
RESULTS: dict[str, Any] = {
    "open_connector": Contact,
    "verify": bool,
    "timed": Timed,
    "stream_open": int,
}
"""Of those that answer more than that it is done."""

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def _encode(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} of {len(data)} bytes is too large to be sent")
    return data


def _decode(data: bytes) -> list[Any]:
    try:
        return [_decoder.decode(data)]
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise WireError(f"not a message of two machines that measure: {error}") from None


class FarChannel(Channel):
    """A channel of these messages. One thread only."""

    def __init__(self, identity: str, listen: str | None, keys: Keys | None) -> None:
        super().__init__(identity, listen, keys, Codec(_encode, _decode))

    def tell(self, peer: str, message: Message) -> None:
        """Raises ControlError, as `send`."""
        anything: Any = message
        self.send(peer, anything)

    def hear(self, timeout_s: float) -> list[tuple[str, Message]]:
        """(who, what) of all that came, after `timeout_s` at the most."""
        letters: list[Any] = list(self.poll(timeout_s))
        return [(letter.peer, letter.message) for letter in letters]


def tcp_address(option: str, text: str) -> str:
    """HOST:PORT or tcp://HOST:PORT, with #NAME or without, as channels take it."""
    address = text if "://" in text else f"tcp://{text}"
    if not address.startswith("tcp://"):
        raise UsageError(option, text, "must look like HOST:PORT or tcp://HOST:PORT")
    return address


def host_of(address: str) -> str:
    """Without the brackets of IPv6."""
    plain, _ = split_name(address)
    return plain.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def keys_of(key_file: Path | None, peer_keys: Path | None) -> Keys | None:
    """Raises UsageError."""
    return Keys.load(key_file, peer_keys)


def pack(types: dict[str, Any], verb: str, value: Any) -> bytes:
    """Raises WireError for a verb that does not travel."""
    if types is ARGUMENTS and verb not in types:
        raise WireError(f"{verb!r} cannot be asked of another machine")
    return msgspec.msgpack.encode(value)


def unpack(types: dict[str, Any], verb: str, data: bytes) -> Any:
    """Raises WireError for what is not of the verb's type, or no verb."""
    if types is ARGUMENTS and verb not in types:
        raise WireError(f"{verb!r} is nothing that may be asked")
    try:
        return msgspec.msgpack.decode(data, type=types.get(verb))
    except (msgspec.MsgspecError, KvxferError, RecursionError, OverflowError) as error:
        raise WireError(f"{verb}: {error}") from None
