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

from kvxfer.control.auth import Keys
from kvxfer.control.messages import WIRE_VERSION, Hello
from kvxfer.control.wire import decode_frame
from kvxfer.errors import WireError

AS_ROUTER = ("Generate", "Generate", "Cancel", "StatusQuery", "Drain", "Prefills")
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


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.0."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


STARTS = (b"", b"\x01\x00", greeting(b"NULL"), greeting(b"CURVE"))
"""Of a connection: none, that of ZMTP 1.0 and those of 3.0."""
STRANGER = b"stranger"
"""As whom they come."""


class Stranger:
    """Has no key, or with `keys` one that is not allowed: over TCP it sends bare bytes, and what
    it says over a ZeroMQ socket is in the clear, or as its key has it. Nobody answers."""

    def __init__(self, address: str, wrong: WrongMessages, keys: Keys, server: bytes) -> None:
        self._address = address.partition("#")[0]
        self._wrong = wrong
        self._context = zmq.Context()
        self._num = 0
        self.num_answers = 0
        self._dealers = {"no key, ZeroMQ": self._dealer(), "wrong key": self._dealer()}
        keys.introduce(self._dealers["wrong key"], server)
        for dealer in self._dealers.values():
            dealer.connect(self._address)

    def _dealer(self) -> Any:
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IDENTITY, STRANGER)
        return made

    def send(self) -> str:
        self._num += 1
        data = self._wrong.next(Live())
        ways = (*self._dealers, "no key, bytes")
        way = ways[self._num % len(ways)]
        if way not in self._dealers:
            self._send_bytes(STARTS[self._num // len(ways) % len(STARTS)] + data)
            return way
        dealer = self._dealers[way]
        try:
            dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:  # libzmq gives an address up that speaks another mechanism, or refuses
            dealer.disconnect(self._address)
            dealer.connect(self._address)
            dealer.send(data, zmq.NOBLOCK)
        return way

    def _send_bytes(self, data: bytes) -> None:
        port = int(self._address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)

    def turn(self) -> None:
        for dealer in self._dealers.values():
            while dealer.poll(0, zmq.POLLIN):
                dealer.recv()
                self.num_answers += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
