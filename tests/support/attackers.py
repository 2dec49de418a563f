"""Those who send wrong messages to the workers and the router of a cluster: with keys, as stranger,
as a worker that is known or as one that was dialled; and without any."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any

import zmq
from support.wire_peer import WirePeer
from support.workers import Worker
from support.wrong_messages import TYPES, Live, WrongMessages

from kvxfer.control.messages import (
    WIRE_VERSION,
    Hello,
)
from kvxfer.control.wire import decode_frame
from kvxfer.errors import WireError

AS_ROUTER = ("Generate", "Generate", "Cancel", "StatusQuery")
SAY_HELLO_EVERY = 8
"""Messages: one that is wrong costs a peer its session."""


class Dialler:
    """Dials a worker, greets it as a worker of the other role, and sends. Its name is new each
    time, so that it stands for any number of peers."""

    def __init__(self, target: Worker, peer: WirePeer, wrong: WrongMessages, greets: bool) -> None:
        self.target = target
        self.peer = peer
        self.greets = greets
        self.wrong = wrong
        self.live = Live(first=list(TYPES))
        self.num_sent = 0
        peer.dial(target)

    def send(self) -> str:
        if self.greets and self.num_sent % SAY_HELLO_EVERY == 0:
            self.peer.incarnation = secrets.token_hex(4)
            name = f"{self.peer.role}-x{self.num_sent % 7}"
            is_odd = bool(self.num_sent // SAY_HELLO_EVERY % 2)
            hello = self.peer.hello(worker_id=name, tests_lanes=is_odd)
            self.wrong.learn(hello)
            self.peer.says(hello)
        dealer = self.peer.channel._dealers[self.peer.key]
        if not dealer.poll(0, zmq.POLLOUT):
            return ""
        dealer.send(self.wrong.next(self.live), zmq.NOBLOCK)
        self.num_sent += 1
        return "keys, greets" if self.greets else "keys, says no Hello"

    def turn(self) -> None:
        self.peer.turn()
        for message in self.peer.received:
            self.wrong.learn(message)
            self.live.learn(message)
        self.peer.received.clear()


class Careful:
    """Dials a worker and is met by it, again whenever it was lost; keeps to the protocol so far
    that it comes deep into the states of a request, and is wrong there."""

    def __init__(
        self,
        target: Worker,
        peer: WirePeer,
        wrong: WrongMessages,
        types: Sequence[str],
        **facts: Any,
    ) -> None:
        self.target = target
        self.peer = peer
        self.wrong = wrong
        self.types = types
        self.facts = facts
        self.live = Live()
        identity = f"{peer.options.worker_id}.{peer.incarnation}".encode().hex()
        self._known_as = f"in:{identity}"
        peer.dial(target)

    def send(self) -> str:
        if self.target.peers.get(self._known_as) is None:
            is_router = self.types is AS_ROUTER
            self.peer.incarnation = secrets.token_hex(4)
            hello = Hello(WIRE_VERSION, None) if is_router else self.peer.hello(**self.facts)
            self.peer.says(hello)
            return ""
        data = self.wrong.nearly_right(self.live, self.types)
        try:
            self.peer.channel._dealers[self.peer.key].send(data, zmq.NOBLOCK)
        except zmq.Again:
            return ""
        return "keys, nearly right"

    def turn(self) -> None:
        self.peer.turn()
        for message in self.peer.received:
            self.live.learn(message)
        self.peer.received.clear()


class Posing:
    """Listens at an address that a decode worker, or a router, dials; answers its Hello rightly and
    sends what is wrong after that.

    Reject, and a Welcome that does not fit, end who dialled, by design: never sent."""

    def __init__(self, peer: WirePeer, wrong: WrongMessages, never: tuple[type, ...]) -> None:
        self.peer = peer
        self.wrong = wrong
        self.never = never
        self.live = Live(first=[name for name in TYPES if name not in names_of(never)])
        self.who: bytes | None = None

    def send(self) -> str:
        if self.who is None:
            return ""
        data = self.wrong.next(self.live)
        if self._is_never(data):
            return ""
        assert self.peer.channel._router is not None
        try:
            self.peer.channel._router.send_multipart([self.who, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return ""
        return "keys, was dialled"

    def _is_never(self, data: bytes) -> bool:
        try:
            return any(isinstance(message, self.never) for message in decode_frame(data))
        except WireError:
            return False

    def turn(self) -> None:
        self.peer.turn()
        for message in self.peer.received:
            self.wrong.learn(message)
            self.live.learn(message)
            if isinstance(message, Hello):
                self.who = bytes.fromhex(self.peer.key.removeprefix("in:"))
                self.peer.says(self.peer.welcome("push"))
        self.peer.received.clear()


def names_of(kinds: tuple[type, ...]) -> set[str]:
    return {kind.__name__ for kind in kinds}


STARTS = (b"", b"\x01\x00", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
"""Of a connection: none, that of ZMTP 1.0 and of 3.0."""


class Stranger:
    """Has no key: a ZeroMQ socket that speaks NULL, or bare bytes over TCP."""

    def __init__(self, address: str, wrong: WrongMessages) -> None:
        self._address = address.partition("#")[0]
        self._wrong = wrong
        self._context = zmq.Context()
        self._num = 0
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(self._address)

    def send(self) -> str:
        self._num += 1
        data = self._wrong.next(Live())
        if self._num % 2:
            try:
                self._dealer.send(data, zmq.NOBLOCK)
            except zmq.Again:  # libzmq gives an address up that speaks another mechanism
                self._dealer.disconnect(self._address)
                self._dealer.connect(self._address)
                return ""
            return "no key, ZeroMQ"
        port = int(self._address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(STARTS[self._num // 2 % len(STARTS)] + data)
        return "no key, bytes"

    def turn(self) -> None:
        return

    def close(self) -> None:
        self._context.destroy(linger=0)
