"""Those who send wrong messages to the workers and the router of a cluster: with keys, as stranger,
as a worker that is known or as one that was dialled; and without any."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from support.cluster import Cluster
from support.keys import KeyRing
from support.wire_peer import WirePeer
from support.workers import Worker
from support.wrong_messages import TYPES, Live, WrongMessages

from kvxfer.control.cache_messages import (
    CacheState,
    Defragment,
    RegionsRevoke,
    RegionsRevoked,
    Shrink,
    Sleep,
    WakeUp,
)
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.lane_messages import LaneChosen, LanePush, LanePushed, LaneReady, LaneTrial
from kvxfer.control.messages import (
    WIRE_VERSION,
    Abort,
    Aborted,
    Cancel,
    Confirmed,
    Done,
    Failed,
    Finished,
    FirstToken,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Ready,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Sampling,
    Status,
    StatusQuery,
    Taken,
    Token,
    TransferStats,
    Welcome,
)
from kvxfer.control.wire import decode
from kvxfer.errors import WireError
from kvxfer.serve.router import Backend, Completion, Router
from kvxfer.transfer.regions import Region
from kvxfer.worker.residency import ResidencyState

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
            return isinstance(decode(data), self.never)
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


def watch_handlers(worker: Worker, counts: Counter[str]) -> None:
    """Count what each handler of `worker` was given, and how that ended."""

    def watched(name: str, handler: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        def call(key: str, message: Any) -> None:
            try:
                handler(key, message)
            except Exception:
                counts[f"{name} refused"] += 1
                raise
            counts[f"{name} taken"] += 1

        return call

    for kind, handler in list(worker.loop._handlers.items()):
        worker.loop._handlers[kind] = watched(kind.__name__, handler)


BESIDES = ("FirstToken", "Failed", "Aborted", "Heartbeat", "RegionsAck")
AS_PREFILL = {
    "push": ("Done", "Done", *BESIDES),
    "pull": ("Ready", "Ready", "Ready", "Confirmed", "Confirmed", *BESIDES),
    "trial": ("LaneReady", "LaneReady", "LanePushed", "LanePushed", "Done", "Ready", *BESIDES),
}
AS_DECODE = ("PrefillRequest", "PrefillRequest", "Taken", "Abort", "Heartbeat", "RegionsAck",
             "LaneTrial", "LanePush", "LaneChosen")  # fmt: skip
AS_ROUTER = ("Generate", "Generate", "Cancel", "StatusQuery")
EXAMPLES: tuple[Message, ...] = (
    Generate("g", list(range(18)), 4, Sampling(), [], "", True), Cancel("g"),
    Ready("g", Lease("g", [[1, 2, 3, 4, 5]], 1.0), 0, 18, [(0, 2)], True), Taken("g", "g"),
    Ready("g", Lease("g", [[1, 2, 3, 4, 5]], 1.0), 0, 8, [(0, 1)], False),
    FirstToken("g", "g", 5), Confirmed("g", "g", None), Failed("g", "g", "x"), Abort("g", "g", "x"),
    Done("g", "g", 18, 2, 1, TransferStats(), None), Aborted("g", "g"), Heartbeat(), RegionsAck(1),
    LaneTrial("t", 4, [1]), LaneReady("t", [1]), LanePush("t", "loopback/push", 4),
    LanePushed("t", "loopback/push", 100, ""),
    LaneChosen("t", "loopback/push", 1.0, ["loopback/push"]),
    Shrink([2], 0.1), Sleep(0.1), WakeUp(), Defragment(0.1), StatusQuery(), Goodbye("g"),
    RegionsRevoke(1, [Region(0, 4096)], [b""]), RegionsRevoked(1),
    RegionsUpdate(2, [Region(0, 4096)], [b""]), Reject("model", "a", "b"), Token("g", 0, 5),
    Finished("g", "length", "", 5, TransferStats(), ["00"], 1, 0.0),
    Status("w", {"a": 1, "b": "c"}),
    CacheState("Shrink", "", False, [4], 4096, 0, 0),
)  # fmt: skip
"""Of what is seldom said, or by some lanes only."""
PLAYED = {
    "xd": "decode", "xp": "prefill", "xs": "prefill", "xr": "decode",
    "quiet-d": "decode", "quiet-p": "prefill",
    "push-d": "decode", "push-p": "prefill", "pull-d": "decode", "pull-p": "prefill",
    "trial-d": "decode", "trial-p": "prefill", "asks": "decode",
}  # fmt: skip
"""Attackers, by the names of their keys, and as what they come."""
TIMES: dict[str, Any] = {"lane_test": True, "peer_timeout_s": 2.0, "request_timeout_s": 2.0}


class Attack:
    """A pair of workers and two routers with keys, and all kinds of attackers around them."""

    def __init__(self, cluster: Cluster, ring: KeyRing, seed: int) -> None:
        for name in ("p", "d", "r", *PLAYED):
            ring.make(name)
        self.cluster = cluster
        self.wrong = WrongMessages(seed)
        self.sent: Counter[str] = Counter()
        self.delivered: dict[str, Counter[str]] = {
            "prefill": Counter(), "decode": Counter(), "router": Counter(),
        }  # fmt: skip
        self.handled: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        ours = {"prefill": ring.options("p"), "decode": ring.options("d")}
        self.prefill, self.decode = cluster.pair("auto", **ours, **TIMES)
        for worker, name in ((self.prefill, "prefill"), (self.decode, "decode")):
            watch_handlers(worker, self.handled[name])
            self._tap(worker.channel, self.delivered[name])
        cluster.connect_router(self.decode, ring.keys("r"))
        self.misled = Router(peer_timeout_s=1e9, keys=ring.keys("r"))
        self._tap(self.misled._channel, self.delivered["router"])
        self.peers = {name: self._peer(ring, name) for name in PLAYED}
        self._dial()

    def _peer(self, ring: KeyRing, name: str) -> WirePeer:
        listen = "tcp://127.0.0.1:0" if name in ("xs", "xr") else None
        return WirePeer(PLAYED[name], listen, worker_id=name, **TIMES, **ring.options(name))

    def _dial(self) -> None:
        wrong, peers = self.wrong, self.peers
        self.strangers = [Stranger(one.address, wrong) for one in (self.prefill, self.decode)]
        self.attackers: list[Any] = [
            Dialler(self.prefill, peers["xd"], wrong, greets=True),
            Dialler(self.decode, peers["xp"], wrong, greets=True),
            Dialler(self.prefill, peers["quiet-d"], wrong, greets=False),
            Dialler(self.decode, peers["quiet-p"], wrong, greets=False),
            Posing(peers["xs"], wrong, (Reject, Welcome)),
            Posing(peers["xr"], wrong, (Reject, Goodbye)),
            *self.strangers,
            Careful(self.decode, peers["asks"], wrong, AS_ROUTER),
        ]
        for lane in ("push", "pull", "trial"):
            only = {"lanes": [f"loopback/{lane}"], "tests_lanes": False}
            if lane == "trial":
                only = {"tests_lanes": True}
            as_decode, as_prefill = peers[f"{lane}-d"], peers[f"{lane}-p"]
            self.attackers += [
                Careful(self.prefill, as_decode, wrong, AS_DECODE, **only),
                Careful(self.decode, as_prefill, wrong, AS_PREFILL[lane], **only),
            ]
        self.decode.peers.dial(peers["xs"].address)
        key = self.misled._channel.dial(peers["xr"].address)
        self.misled._backends[key] = Backend(key)
        self.asked: Completion | None = None

    def _tap(self, channel: Channel, delivered: Counter[str]) -> None:
        """Count what is decoded."""
        poll = channel.poll

        def tapped(timeout_s: float) -> list[Letter]:
            letters = poll(timeout_s)
            for letter in letters:
                delivered[type(letter.message).__name__] += 1
            return letters

        channel.poll = tapped  # type: ignore[method-assign]

    def learn(self) -> None:
        """What is really said when a prompt is served both ways, and what routers may ask for."""
        for worker in self.cluster.workers:
            send = worker.channel.send

            def tapped(peer: str, message: Any, send: Any = send) -> None:
                self.wrong.learn(message)
                send(peer, message)

            worker.channel.send = tapped  # type: ignore[method-assign]
        self.serve()
        peer = self.peers["xs"]
        for message in (*EXAMPLES, peer.welcome("push"), peer.hello()):
            self.wrong.learn(message)

    def serve(self) -> None:
        """A real prompt, which must come out right."""
        sent = self.cluster.send(self.decode, 18, 4)
        self.cluster.finish(sent)
        sent.check_equal()

    def send(self, num: int) -> None:
        """So many wrong messages, and the turns that take them in."""
        done = 0
        while done < num:
            for one in self.attackers:
                kind = one.send()
                if kind:
                    self.sent[kind] += 1
                    done += 1
            self.turn()

    def turn(self) -> None:
        self.cluster.turn()
        self._tend()
        self.misled.poll(0.0)
        backend = next(iter(self.misled._backends.values()))
        if backend.facts is not None and (self.asked is None or self.asked.finished):
            self.asked = self.misled.submit(backend, list(range(18)), 4)
        for one in self.attackers:
            one.turn()

    def _tend(self) -> None:
        """What an operator does. Whoever has a key may put a worker to sleep; and what was granted
        to a peer that is lost stays quarantined until that peer is known to have ended."""
        for worker in self.cluster.workers:
            if worker.parts.residency.state is ResidencyState.ASLEEP:
                worker.parts.residency.wake_up(lambda state: None)
        role = self.decode.role
        owing = [one.prefill for one in role._requests.values() if one.prefill]
        owing += [trial.peer for trial in role._lane_trials._ending]
        for name in {peer.name for peer in owing if not peer.is_met}:
            self.decode.peers.on_fenced(name)

    def stop(self) -> None:
        """The attackers go. Idempotent."""
        for stranger in self.strangers:
            stranger.close()
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        self.misled.close()

    def turned_away(self, worker: Worker) -> dict[str, int | float | str]:
        """What `worker` says in Status."""
        told: list[Any] = []
        send = worker.channel.send
        worker.channel.send = lambda peer, message: told.append(message)  # type: ignore
        worker.loop._on_status_query("nobody", StatusQuery())
        worker.channel.send = send  # type: ignore[method-assign]
        return dict(told[0].values)

    def heal(self) -> None:
        """Until the workers have each other again, awake, and nothing else."""
        workers = self.prefill, self.decode

        def healthy() -> bool:
            self._tend()
            awake = all(w.parts.residency.state is ResidencyState.AWAKE for w in workers)
            ready = [[peer.name for peer in worker.peers.ready()] for worker in workers]
            return awake and ready == [["decode-0"], ["prefill-0"]] and self.cluster.idle()

        self.cluster.until(healthy, 30.0)
