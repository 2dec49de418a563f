"""Several messages to one peer in one of ZeroMQ's: its threads, and the peer, wake up once.

    alone:    message
    a batch:  message … message ''      at most MAX_BATCH of them, then an empty frame

Facts (ZeroMQ 4.3.5): whether a message can be sent at all shows with its first frame, and the other
end gets all of its frames or none. A thread of ZeroMQ's is woken by the last frame, for 15 µs; each
further one costs 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvxfer.errors import WireError

MAX_BATCH = 64
"""Messages; what waits for one peer is bounded by batches (`channel.MAX_QUEUED`)."""
# Plain numbers: combining two of the library's flags takes longer than sending a frame.
NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(slots=True)
class _Open:
    """A batch under way on one socket."""

    route: bytes
    num_messages: int = 0


class Batches:
    """What is sent, by socket: of one socket, one batch at a time. Raises zmq.ZMQError."""

    def __init__(self) -> None:
        self._open: dict[zmq.Socket[bytes], _Open] = {}

    def add(self, socket: zmq.Socket[bytes], route: bytes, data: bytes) -> None:
        """Put it at the end of the batch for `route` (b'': the socket has one peer), which leaves
        with `end`, or with a message for somebody else."""
        batch = self._open.get(socket)
        if batch is not None and (batch.route != route or batch.num_messages == MAX_BATCH):
            self.end(socket)
            batch = None
        if batch is None:
            if route:
                socket.send(route, _MORE)
            batch = self._open[socket] = _Open(route)
        batch.num_messages += 1
        socket.send(data, _MORE)

    def send(self, socket: zmq.Socket[bytes], route: bytes, data: bytes) -> None:
        """Alone, behind what was added before."""
        self.end(socket)
        if route:
            socket.send(route, _MORE)
        socket.send(data, NOW)

    def end(self, socket: zmq.Socket[bytes]) -> None:
        """Let the batch of `socket` leave, if there is one."""
        if self._open.pop(socket, None) is not None:
            socket.send(b"", NOW)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those with a batch under way."""
        return list(self._open)


def messages_of(frames: Sequence[bytes]) -> Sequence[bytes]:
    """What the frames of one of ZeroMQ's messages hold. Raises WireError."""
    if len(frames) == 1:
        return frames
    if not 2 <= len(frames) <= MAX_BATCH + 1 or frames[-1]:
        raise WireError(f"{len(frames)} frames, which are neither a message nor a batch")
    return frames[:-1]
