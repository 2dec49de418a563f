"""What two ends of `offload` say to each other: over a Unix socket, with the descriptors of their
tiers. Of what a peer says nothing is believed that its slots do not prove.
"""

from __future__ import annotations

import socket
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from os import fstat
from typing import Annotated

import msgspec

from connectors.handover_socket import close_all, receive, send
from kvxfer.errors import ConnectorError

MAX_TIERS = 2
FRAMES_A_TURN = 64

_Parcel = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TIERS)]
_Slot = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
MAX_SLOT_BYTES = 64 << 20
_SlotBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_Extents = Annotated[bytes, msgspec.Meta(max_length=8 << 10)]


class Open(msgspec.Struct, frozen=True, tag=True):
    """First frame of who connects, with the descriptors of its tiers."""

    token: Annotated[bytes, msgspec.Meta(max_length=64)]
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    slot_bytes: _SlotBytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer, with the descriptors of the other's tiers."""

    slot_bytes: _SlotBytes


class Load(msgspec.Struct, frozen=True, tag=True):
    """A push: a parcel is in a slot of mine; its bytes go to `extents` of your window."""

    parcel: _Parcel
    tier: _Index
    slot: _Slot
    key: _Key
    extents: _Extents


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """They are there; the slot is not read any more."""

    parcel: _Parcel


class Store(msgspec.Struct, frozen=True, tag=True):
    """A pull: put the bytes of `extents` of your window in a slot of yours."""

    parcel: _Parcel
    extents: _Extents


class Stored(msgspec.Struct, frozen=True, tag=True):
    """They are in it, until you say `Taken`."""

    parcel: _Parcel
    tier: _Index
    slot: _Slot
    key: _Key


class Taken(msgspec.Struct, frozen=True, tag=True):
    parcel: _Parcel


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more happens to this parcel."""

    parcel: _Parcel
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Last frame of who hangs up for a reason."""

    reason: Annotated[str, msgspec.Meta(max_length=1024)]


Frame = Open | Welcome | Load | Loaded | Store | Stored | Taken | Failed | Refused
_FRAMES: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Wire:
    """One connection, whose socket it owns, and the descriptors of the other side's tiers."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outbox: deque[tuple[Frame, Sequence[int]]] = deque()
        self.tiers: list[int] = []
        self.slot_bytes = 0
        """Of the other side; 0 until it said."""

    def say(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        """`flush` sends it; `fds` stay the caller's, and open until then."""
        self._outbox.append((frame, fds))

    def flush(self) -> None:
        """Raises ConnectorError when it cannot be sent, HungUp when the other side is gone."""
        while self._outbox and send(self._socket, *self._outbox[0]):
            self._outbox.popleft()

    def hear(self) -> Iterator[Frame]:
        """What came, one by one; a few at the most. Raises ConnectorError, HungUp as `flush`."""
        for _ in range(FRAMES_A_TURN):
            received = receive(self._socket, MAX_TIERS)
            if received is None:
                return
            yield self._taken(*received)

    def hang_up(self) -> None:
        """The other side's tiers may still be read, until `close`. Idempotent."""
        self._socket.close()

    def close(self) -> None:
        """Idempotent."""
        self.hang_up()
        close_all(self.tiers)
        self.tiers = []

    def _taken(self, data: bytes, fds: list[int]) -> Frame:
        with ExitStack() as undo:
            undo.callback(close_all, fds)
            try:
                frame = _FRAMES.decode(data)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ConnectorError(f"sent no frame of ours: {error}") from error
            if isinstance(frame, Refused):
                raise ConnectorError(f"refused: {frame.reason}")
            if isinstance(frame, Open | Welcome) != bool(fds) or (fds and self.tiers):
                raise ConnectorError(f"{len(fds)} descriptors came with {type(frame).__name__}")
            if not all(stat.S_ISREG(fstat(fd).st_mode) for fd in fds):
                raise ConnectorError("sent a tier that is no file")
            undo.pop_all()
        if isinstance(frame, Open | Welcome):
            self.tiers, self.slot_bytes = fds, frame.slot_bytes
        return frame
