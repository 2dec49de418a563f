"""The control plane's sockets: one ROUTER that others dial, one DEALER for each worker dialled.

Facts (ZeroMQ 4.3.5): a ROUTER drops messages to an identity that it does not know unless
ROUTER_MANDATORY is set; a DEALER reconnects by itself and keeps order; sockets belong to one
thread, so a channel is used by the control thread alone and other threads wake it by a file
descriptor (see `kvxfer.worker.mailbox`). A DEALER that was told IMMEDIATE drops, with its
connection, also what came and was not read yet: last words are for those who wait for an answer.
Unix sockets: see `kvxfer.control.addresses`. Over a link that is cut and back after 30 s, TCP sends
again only 25 s later, as its pauses double; a new connection is there at once. A ROUTER takes no
second connection of an identity while it has the first: it must notice the cut before the dealer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from kvxfer.control.addresses import (
    IPC,
    SocketFile,
    check_address,
    check_advertised,
    check_free,
    split_name,
    with_port,
)
from kvxfer.control.auth import DOMAIN, Door, Keys
from kvxfer.control.batches import NOW, Batches
from kvxfer.control.messages import Hello, Message, Reject
from kvxfer.control.wire import MAX_MESSAGE_BYTES, decode_frame, encode
from kvxfer.errors import ControlError, UsageError, WireError

logger = logging.getLogger(__name__)

RECONNECT_MS = 100
RECONNECT_MAX_MS = 1600
"""Pauses between attempts to connect double up to the maximum; ZeroMQ adds some chance."""
CONNECT_TIMEOUT_MS = 2000
"""Of one attempt: TCP's own next ones come later and later."""
DEAD_AFTER_MS = {zmq.ROUTER: 5000, zmq.DEALER: 8000}
"""A TCP connection on which nothing is acknowledged for so long is given up, by the kernel."""
KEEPALIVE_S = 2
"""After which a TCP connection that says nothing is asked, again and again, whether it lives."""
MAX_QUEUED = 1000
"""Batches that wait for one peer: one that reads no more costs no more than this, and what the
kernel holds. The next one is refused, and the peer is lost."""
MAX_UNREAD = 16
"""Batches that came by one connection and wait for us, of MAX_MESSAGE_BYTES each: 256 MiB at the
most. What comes behind them waits at its sender's.
Measured: small ones come as quickly as with 1,000. ZeroMQ counts whole messages and bounds each
part: one that never ends, which only a peer that is hostile sends, it takes in part by part."""
MAX_DRAINED = 256
"""Of one socket, before others have their turn."""
_READABLE = int(zmq.POLLIN)
ALONE = (Hello, Reject)
"""Never in a batch: those of another wire version have to understand them."""
LINGER_MS = 200
"""How long a closing socket may still send its last words."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message and whom it came from: the key to answer to."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Codec:
    """Messages as bytes, and what a frame of bytes holds. Both raise WireError. Who gives a channel
    another one than `WORKERS` sends and gets messages of its own kind."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], list[Any]]


WORKERS = Codec(encode, decode_frame)
"""What workers and routers say: `control.messages`."""


def check_dial(field: str, address: str, keys: Keys | None) -> tuple[str, bytes]:
    """`address` without the name of a key, and the key that belongs there, b'' without `keys`.

    Raises UsageError.
    """
    if keys is None:
        plain, name = (address, "") if address.startswith(IPC) else split_name(address)
        if name:
            raise UsageError(field, address, f"names the key {name}, but there is no key_file")
        check_address(field, address)
        return address, b""
    plain, name = split_name(address)
    check_address(field, plain, has_keys=True)
    return plain, keys.named(field, address, name)


class Channel:
    """Binds at most one address, dials any number. One thread only.

    Addresses are those that `check_address` takes; a Unix socket's file has mode 0600 and goes
    when the channel closes. A peer's key is 'in:<identity>' if it dialled us, 'out:<address>' if
    we dialled it. With `keys` every socket is encrypted, and nothing passes from or to anybody
    whose key is not allowed, nor from one whose key was revoked; `address` then ends in '#NAME'
    of our key, as those we dial do in that of theirs.
    """

    def __init__(
        self,
        identity: str,
        listen: str | None = None,
        keys: Keys | None = None,
        codec: Codec = WORKERS,
        advertise: str = "",
    ) -> None:
        """`advertise` is what others dial, where that is not `listen`; its port may be 0."""
        if listen is not None:
            has_keys = keys is not None
            told = bool(advertise)
            check_address("listen", listen, has_keys=has_keys, binds=True, is_advertised=told)
            if advertise:
                check_advertised(advertise, listen, has_keys)
            check_free("listen", listen)
        self._keys = keys
        self._codec = codec
        self._context = zmq.Context()
        self._identity = identity.encode()
        self._poller = zmq.Poller()
        self._batches = Batches()
        self._gathers = False
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._router: zmq.Socket[bytes] | None = None
        self._file: SocketFile | None = None
        self._door: Door | None = None
        self._server_keys: dict[str, bytes] = {}
        self.num_malformed = 0
        self.num_revoked = 0
        """Messages dropped since whose key they came with is allowed no longer."""
        self.address = ""
        """Where others reach us, with the port that was really bound."""
        if listen is not None:
            self._bind(listen, advertise)

    def _bind(self, listen: str, advertise: str) -> None:
        if self._keys is not None:
            self._door = Door(self._context, self._keys)
            self._poller.register(self._door.socket, zmq.POLLIN)
        router = self._socket(zmq.ROUTER, listen)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)  # refuses ZMTP 1.0 and 2.0, keys or not
        if self._keys is not None:
            self._keys.guard(router)
        self._router = router
        try:
            router.bind(listen)
            self._file = SocketFile(listen)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise UsageError("listen", listen, f"cannot bind: {error}") from error
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        bound = endpoint.decode().rstrip("\0")
        self.address = with_port(advertise, bound) if advertise else bound
        if self._keys is not None:
            self.address += f"#{self._keys.name}"

    def _socket(self, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if "[" in address and not address.startswith(IPC):
            socket.setsockopt(zmq.IPV6, 1)
        if not address.startswith(IPC):
            socket.setsockopt(zmq.TCP_MAXRT, DEAD_AFTER_MS[kind])
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
            socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def dial(self, address: str) -> str:
        """Connect (in the background, again and again) to `address`; returns the peer's key."""
        plain, server = check_dial("address", address, self._keys)
        key = f"out:{address}"
        if key in self._dealers:
            return key
        dealer = self._socket(zmq.DEALER, plain)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not there
        if self._keys is not None:
            self._keys.introduce(dealer, server)
            self._server_keys[key] = server
        try:
            dealer.connect(plain)
        except zmq.ZMQError as error:
            self._close_dealer(key, dealer)
            raise UsageError("address", address, f"cannot connect: {error}") from error
        self._dealers[key] = dealer
        return key

    def check_dial(self, field: str, address: str) -> None:
        """Raise UsageError where `dial` would refuse `address`."""
        check_dial(field, address, self._keys)

    def hang_up(self, key: str) -> None:
        """End the connection to a worker that we dialled: what was sent may still leave, within
        LINGER_MS, and nothing of it comes in any more. Idempotent."""
        dealer = self._dealers.pop(key, None)
        if dealer is not None:
            self._end_batch(dealer)
            self._close_dealer(key, dealer)

    def _close_dealer(self, key: str, dealer: zmq.Socket[bytes]) -> None:
        self._poller.unregister(dealer)
        self._server_keys.pop(key, None)
        dealer.close()

    def watch(self, fd: int) -> None:
        """Let `poll` return early when `fd` becomes readable; its owner reads it."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed."""
        self._poller.unregister(fd)

    def fds(self) -> list[int]:
        """File descriptors that become readable when something may have arrived, for an event loop.

        They are ZeroMQ's, and edge-triggered: any call on a socket, a send too, may take the edge
        away. So whoever waits on them polls until `is_readable` is False, after sends as well.
        """
        return [int(socket.getsockopt(zmq.FD)) for socket in self._sockets()]

    def is_readable(self) -> bool:
        """Whether `poll` would find something now."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & _READABLE for socket in self._sockets())

    def _sockets(self) -> list[zmq.Socket[bytes]]:
        own = [self._router] if self._router is not None else []
        door = [self._door.socket] if self._door is not None else []
        return [*own, *door, *self._dealers.values()]

    def send(self, peer: str, message: Message) -> None:
        """Queue a message. Raises ControlError when the peer is gone or takes nothing more."""
        server = self._server_keys.get(peer)
        if server is not None and self._keys is not None and not self._keys.allows(server):
            raise ControlError(f"the key of {peer} was revoked")
        data = self._codec.encode(message)
        socket, route = self._way_to(peer)
        is_alone = not self._gathers or isinstance(message, ALONE)
        try:
            (self._batches.send if is_alone else self._batches.add)(socket, route, data)
        except zmq.ZMQError as error:
            name = type(message).__name__
            raise ControlError(f"cannot send {name} to {peer}: {error}") from error

    def _way_to(self, peer: str) -> tuple[zmq.Socket[bytes], bytes]:
        """The socket, and what it calls the peer, b'' where it has no other."""
        if (dealer := self._dealers.get(peer)) is not None:
            return dealer, b""
        if self._router is not None and peer.startswith("in:"):
            return self._router, bytes.fromhex(peer.removeprefix("in:"))
        raise ControlError(f"no peer {peer!r}")

    def gather(self) -> None:
        """What is sent from now on leaves with `let_go`, in batches; `send` raises what it raises
        else."""
        self._gathers = True

    def let_go(self) -> None:
        """Send what was gathered, and gather no more."""
        self._gathers = False
        for socket in self._batches.sockets:
            self._end_batch(socket)

    def _end_batch(self, socket: zmq.Socket[bytes]) -> None:
        """A connection that broke since the batch began took all of it along, as it takes what it
        was about to carry: peers ask again for what they miss."""
        try:
            self._batches.end(socket)
        except zmq.ZMQError as error:
            logger.info("a batch was lost with its connection: %s", error)

    def poll(self, timeout_s: float) -> list[Letter]:
        """Wait for up to `timeout_s` and return what arrived; malformed input is dropped."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        letters: list[Letter] = []
        if self._keys is not None:
            self._keys.refresh()
        if self._door is not None and self._door.socket in ready:
            self._door.answer()
        if self._router is not None and self._router in ready:
            self._drain(self._router, None, letters)
        for key, dealer in self._dealers.items():
            if dealer in ready:
                self._drain(dealer, key, letters)
        return letters

    def _drain(self, socket: zmq.Socket[bytes], key: str | None, letters: list[Letter]) -> None:
        limit, left = len(letters) + MAX_DRAINED, MAX_MESSAGE_BYTES
        for _ in range(MAX_DRAINED):  # bounded, so that one busy peer cannot keep the loop here
            if len(letters) >= limit or left <= 0:
                return
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            try:
                frames = self._receive(socket, key)
            except zmq.Again:  # its connection broke in between
                return
            left -= sum(map(len, frames))
            if not frames:
                continue
            peer = key or f"in:{frames[0].hex()}"
            body = frames if key else frames[1:]
            try:
                if len(body) != 1:
                    raise WireError(f"{len(body)} frames where 1 belongs")
                found = self._codec.decode(body[0])
            except WireError as error:
                self.num_malformed += 1
                if self.num_malformed & (self.num_malformed - 1) == 0:  # 1st, 2nd, 4th, 8th, ...
                    logger.warning("dropped malformed message %d: %s", self.num_malformed, error)
            else:
                letters += [Letter(peer, message) for message in found]

    def _receive(self, socket: zmq.Socket[bytes], key: str | None) -> list[bytes]:
        """The frames of one message; [] for one whose sender's key was revoked."""
        if self._keys is None:
            return socket.recv_multipart(NOW)
        frames = socket.recv_multipart(NOW, copy=False)
        # Who dialled us has its key in each frame that came by the wire, as the last one did.
        public = self._server_keys[key] if key else str(frames[-1].get("User-Id")).encode()
        if self._keys.allows(public):
            return [frame.bytes for frame in frames]
        self.num_revoked += 1
        return []

    def counts(self) -> dict[str, int]:
        """What was turned away, for Status."""
        refused = 0 if self._door is None else self._door.num_refused
        return {
            "malformed_messages": self.num_malformed,
            "revoked_messages": self.num_revoked,
            "refused_connections": refused,
        }

    def close(self) -> None:
        """Close all sockets; last words may take LINGER_MS. Idempotent."""
        if self._file is not None:
            self._file.remove()
        for socket in (self._router, *self._dealers.values()):
            if socket is not None:
                socket.close()
        if self._door is not None:
            self._door.close()
        self._router = self._door = None
        self._dealers.clear()
        self._context.destroy(linger=LINGER_MS)
