"""Several messages to one peer in one frame: ZeroMQ's threads, and the peer, wake up once.

    one message:  as `control.wire` encodes it, a map
    a batch:      an array of 2 to MAX_BATCH of them (`wire.join`)

Facts (ZeroMQ 4.3.5, pyzmq 27): a call that sends or receives a frame lets go of the interpreter's
lock, which threads of ours may wait for; waking one of ZeroMQ's costs 15 µs. A ROUTER says at the
frame that names the peer whether it can be sent to, a DEALER by POLLOUT.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from kvxfer.control.wire import MAX_BATCH, MAX_MESSAGE_BYTES, join

_HEADER_BYTES = 3
# Plain numbers: combining two of the library's flags takes longer than sending a frame.
NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_WRITABLE = int(zmq.POLLOUT)


@dataclass(slots=True)
class _Open:
    """A batch under way on one socket."""

    route: bytes
    messages: list[bytes] = field(default_factory=list)
    num_bytes: int = _HEADER_BYTES

    def has_room(self, data: bytes) -> bool:
        return len(self.messages) < MAX_BATCH and self.num_bytes + len(data) <= MAX_MESSAGE_BYTES


class Batches:
    """What is sent, by socket: of one socket, one batch at a time. Raises zmq.ZMQError."""

    def __init__(self) -> None:
        self._open: dict[zmq.Socket[bytes], _Open] = {}

    def add(self, socket: zmq.Socket[bytes], route: bytes, data: bytes) -> None:
        """Put it at the end of the batch for `route` (b'': the socket has one peer), which leaves
        with `end`, or with a message for somebody else. Whether it can leave shows now."""
        batch = self._open.get(socket)
        if batch is not None and (batch.route != route or not batch.has_room(data)):
            self.end(socket)
            batch = None
        if batch is None:
            _begin(socket, route)
            batch = self._open[socket] = _Open(route)
        batch.messages.append(data)
        batch.num_bytes += len(data)

    def send(self, socket: zmq.Socket[bytes], route: bytes, data: bytes) -> None:
        """Alone, behind what was added before."""
        self.end(socket)
        _begin(socket, route)
        socket.send(data, NOW)

    def end(self, socket: zmq.Socket[bytes]) -> None:
        """Let the batch of `socket` leave, if there is one."""
        if (batch := self._open.pop(socket, None)) is not None:
            socket.send(join(batch.messages), NOW)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those with a batch under way."""
        return list(self._open)


def _begin(socket: zmq.Socket[bytes], route: bytes) -> None:
    if route:
        socket.send(route, _MORE)
    elif not int(socket.getsockopt(zmq.EVENTS)) & _WRITABLE:
        raise zmq.Again
