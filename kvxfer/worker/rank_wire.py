"""What the ranks of one worker say to each other: a call by its number, and a reply to each.

A line is a Unix socket between rank 0 and one follower. A frame is its length in 4 bytes, little
end first, and a msgpack array; what is in it has a type known beforehand on both sides (the table
of `kvxfer.worker.rank_host`). Both ends are ours and of one version, started by one another.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

from kvxfer.errors import DeadlineExceeded, KvxferError, WireError, WorkerDied

MAX_FRAME_BYTES = 64 << 20
"""Block tables of a million entries, a few times over."""
FIRST_CALL = 1
GREETING = 0
"""What a follower says first, as a Reply: that it serves the line."""
_LENGTH_BYTES = 4


class Call(msgspec.Struct, array_like=True, frozen=True):
    """Calls of a line are numbered, from FIRST_CALL on."""

    number: int
    method: str
    arguments: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, frozen=True):
    number: int
    result: msgspec.Raw
    """Only where `error` is ''."""
    error: str = ""
    """The name of the KvxferError that was raised."""
    text: str = ""


encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """`data` as `kind`; WireError where it is not that."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, KvxferError, RecursionError) as error:
        raise WireError(f"between ranks: {error}") from error


class Line:
    """One end of a line, which it owns. One thread at a time sends, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Call | Reply, timeout_s: float) -> None:
        """Raises WorkerDied when nobody is there, DeadlineExceeded when nobody takes it."""
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise WireError(f"between ranks: {len(data)} bytes are more than {MAX_FRAME_BYTES}")
        self._end.settimeout(max(timeout_s, 0.001))
        try:
            self._end.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        except TimeoutError as error:
            raise DeadlineExceeded("the other end of a line takes nothing") from error
        except OSError as error:
            raise WorkerDied(f"the other end of a line is gone: {error}") from error

    def receive(self, kind: type[Call] | type[Reply], timeout_s: float | None) -> Any:
        """The next message. `timeout_s` None waits until the other end says or closes something: a
        follower has nothing else to do, and ends with its parent.

        Raises WorkerDied when the other end is closed, DeadlineExceeded when it is late; after
        either the line is of no use any more.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        size = int.from_bytes(self._take(_LENGTH_BYTES, deadline_s), "little")
        if size > MAX_FRAME_BYTES:
            raise WireError(f"between ranks: {size} bytes are more than {MAX_FRAME_BYTES}")
        return decode(self._take(size, deadline_s), kind)

    def close(self) -> None:
        self._end.close()

    def _take(self, size: int, deadline_s: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            if deadline_s is not None:
                self._end.settimeout(max(deadline_s - time.monotonic(), 0.001))
            else:
                self._end.settimeout(None)
            try:
                more = self._end.recv(size - len(data))
            except TimeoutError as error:
                raise DeadlineExceeded("nothing came from the other end of a line") from error
            except OSError as error:
                raise WorkerDied(f"the other end of a line is gone: {error}") from error
            if not more:
                raise WorkerDied("the other end of a line is closed")
            data += more
        return bytes(data)
