"""A pair of workers and two routers with keys, and all kinds of attackers around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.attackers import AS_ROUTER, STRANGER, Careful, Dialler, Posing, Stranger
from support.cluster import Cluster
from support.keys import KeyRing
from support.plausible import examples
from support.wire_peer import WirePeer
from support.workers import Worker
from support.wrong_messages import WrongMessages

from kvxfer.control.channel import Channel, Letter
from kvxfer.control.messages import Goodbye, Reject, Welcome
from kvxfer.control.router_messages import Prefills, StatusQuery
from kvxfer.errors import HandshakeRejected
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.router import Router
from kvxfer.worker.residency import ResidencyState


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
        self.num_of_strangers = 0
        """Messages that were taken from them: none, ever."""
        self.num_answers = 0
        """Messages that the workers sent meanwhile."""
        self.handled: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        ours = {"prefill": ring.options("p"), "decode": ring.options("d")}
        self.prefill, self.decode = cluster.pair("auto", **ours, **TIMES)
        for worker, name in ((self.prefill, "prefill"), (self.decode, "decode")):
            watch_handlers(worker, self.handled[name])
            self._tap(worker.channel, self.delivered[name])
        cluster.connect_router(self.decode, ring.keys("r"))
        self.misled = Router(peer_timeout_s=1e9, survives_loss=True, keys=ring.keys("r"))
        self._tap(self.misled._channel, self.delivered["router"])
        self.peers = {name: self._peer(ring, name) for name in PLAYED}
        self._dial(ring)

    def _peer(self, ring: KeyRing, name: str) -> WirePeer:
        listen = "tcp://127.0.0.1:0" if name in ("xs", "xr") else None
        return WirePeer(PLAYED[name], listen, worker_id=name, **TIMES, **ring.options(name))

    def _dial(self, ring: KeyRing) -> None:
        wrong, peers, odd = self.wrong, self.peers, ring.keys("odd", allow=False)
        self.strangers = [
            Stranger(one.address, wrong, odd, odd.named("address", one.address, name))
            for one, name in ((self.prefill, "p"), (self.decode, "d"))
        ]
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
        addresses = [self.prefill.address, peers["xs"].address]
        assert self.cluster.router is not None
        for backend in self.cluster.router.backends:
            self.cluster.router._channel.send(backend.key, Prefills(addresses))
        key = self.misled._channel.dial(peers["xr"].address)
        self.misled._backends[key] = Backend(key)
        self.asked: Completion | None = None

    def _tap(self, channel: Channel, delivered: Counter[str]) -> None:
        """Count what is decoded."""
        poll = channel.poll

        def tapped(timeout_s: float) -> list[Letter]:
            letters = poll(timeout_s)
            for letter in letters:
                self.num_of_strangers += letter.peer == f"in:{STRANGER.hex()}"
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
                self.num_answers += 1

            worker.channel.send = tapped  # type: ignore[method-assign]
        self.serve()
        peer = self.peers["xs"]
        nowhere = Prefills(["tcp://127.0.0.1:9#xd"])
        for message in (*examples(), nowhere, peer.welcome("push"), peer.hello()):
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
        """What an operator does. Whoever has a key may put a worker to sleep, or have it drain; and
        what was granted to a peer that is lost stays quarantined until that peer is known to have
        ended."""
        for worker in self.cluster.workers:
            worker.serve_again()
            if worker.parts.residency.state is ResidencyState.ASLEEP:
                worker.parts.residency.wake_up(lambda state: None)
        role = self.decode.role
        given_up = [*role._requests.values(), *role._quarantine]
        owing = [(one.prefill, one.prefill_name) for one in given_up if one.prefill]
        owing += [(trial.peer, trial.peer_name) for trial in role._lane_trials._ended]
        gone = {name for peer, name in owing if not (peer.is_met and peer.name == name)}
        for name in gone:
            self.decode.peers.on_fenced(name)

    @property
    def num_answered_strangers(self) -> int:
        return sum(stranger.num_answers for stranger in self.strangers)

    def last_words(self) -> None:
        """Of whom the router dialled: what ends its talk with it, and a router that has but one."""
        peer = self.peers["xr"]
        peer.says(Goodbye("enough", False))
        self.cluster.until(lambda: self._router_heard("Goodbye"))
        peer.says(Reject("model", "ours", "theirs"))
        with pytest.raises(HandshakeRejected):
            self.cluster.until(lambda: self._router_heard("Reject"))

    def _router_heard(self, name: str) -> bool:
        self.misled.poll(0.0)
        return bool(self.delivered["router"][name])

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
