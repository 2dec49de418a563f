"""Many peers of one worker, simulated: who meets the worker of `kvxfer bench scale`.

| each has of its own                          | what a real one has besides                     |
| ---                                          | ---                                             |
| a ZeroMQ socket and an identity              | a process: one thread reads for all, and its    |
|                                              | time for others' mail counts as on the way      |
| Hello, acknowledgements, heartbeats, Goodbye | a state machine: here what is told is           |
|                                              | acknowledged at once, and no connector learns   |
|                                              | it                                              |
| a NIXL agent (`scale_agents`), which the     | KV: all agents register the same few pages, and |
| worker gets to know, and reads a little from | no prompt is sent                               |
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.control.cache_messages import CacheState, RegionsRevoke, RegionsRevoked, Shrink
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.facts import WorkerFacts
from kvxfer.control.messages import (
    WIRE_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Welcome,
)
from kvxfer.control.resync_messages import HelloWanted, RegionsAt
from kvxfer.control.router_messages import Status, StatusQuery
from kvxfer.errors import CacheError, ControlError, DeadlineExceeded, HandshakeRejected

BEAT_S = 5.0 / 6
"""Between heartbeats: a worker's, of the usual `peer_timeout_s`."""
POLL_S = 0.05
PAUSE_S = 0.1
"""Between two questions of the same kind."""
SHRINK_TIMEOUT_S = 5.0


class PeersChannel(Channel):
    """As if many channels dialled the same worker, each with its own identity."""

    def dial_as(self, identity: str, address: str) -> str:
        """The key of the worker as this one knows it."""
        self._identity = identity.encode()
        dialled = self.dial(address)
        key = f"{dialled} as {identity}"
        self._dealers[key] = self._dealers.pop(dialled)
        return key


@dataclass(slots=True)
class SimulatedPeer:
    """A decode worker, as its prefill worker sees it. Moments are of CLOCK_MONOTONIC."""

    key: str
    facts: WorkerFacts
    is_connected: bool = False
    hello_s: float = 0.0
    welcomed_s: float = 0.0
    """0 while it is not welcome."""
    heard_s: float = 0.0
    silence_s: float = 0.0
    """The longest time between two words of the worker's."""

    def hears(self, now_s: float) -> None:
        self.silence_s = max(self.silence_s, now_s - self.heard_s)
        self.heard_s = now_s


class SimulatedPeers:
    """And a router, which asks. One thread; a context. What is waited for has `timeout_s`, then
    DeadlineExceeded; `check` is called at each turn, and may raise."""

    def __init__(
        self, address: str, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._check = check
        self._peers: dict[str, SimulatedPeer] = {}
        self._answers: dict[type, Message] = {}
        """The router's newest, by kind."""
        self._next_beat_s = 0.0
        self.told: dict[int, dict[str, float]] = defaultdict(dict)
        """By generation of the worker's regions, when each peer was told of it first."""
        self.told_s = time.monotonic()
        """When anybody was last told of one for the first time."""
        self.num_lost = 0
        """How often the worker said that it does not know a peer any more."""
        self._channel = PeersChannel("peers")
        self._router = self._channel.dial_as(f"router.{secrets.token_hex(4)}", address)

    def __enter__(self) -> SimulatedPeers:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    @property
    def all(self) -> Sequence[SimulatedPeer]:
        return list(self._peers.values())

    # --- the router -----------------------------------------------------------------------------

    def meet(self) -> WorkerFacts:
        """What the worker says of itself."""
        found = self._ask(Hello(WIRE_VERSION, None), Welcome)
        assert isinstance(found, Welcome)
        return found.facts

    def status(self) -> dict[str, int | float | str]:
        """The worker's numbers, now."""
        found = self._ask(StatusQuery(), Status)
        assert isinstance(found, Status)
        return found.values

    def shrink(self, num_blocks: Sequence[int]) -> None:
        """Raises CacheError where the worker cannot, or not as far."""
        found = self._ask(Shrink(list(num_blocks), SHRINK_TIMEOUT_S), CacheState)
        assert isinstance(found, CacheState)
        if found.problem:
            raise CacheError(f"shrink: {found.problem}")

    def _ask(self, question: Message, kind: type) -> Message:
        """Its answer, of that kind; it is asked until there is a connection."""
        self._answers.pop(kind, None)
        sent = False

        def is_answered() -> bool:
            nonlocal sent
            sent = sent or self._says(self._router, question)
            return kind in self._answers

        self.until(is_answered, f"an answer to {type(question).__name__}")
        return self._answers[kind]

    # --- the peers ------------------------------------------------------------------------------

    def add(self, facts: WorkerFacts) -> None:
        """One more, which dials the worker and says no Hello yet."""
        identity = f"{facts.worker_id}.{facts.incarnation}"
        key = self._channel.dial_as(identity, self._address)
        self._peers[key] = SimulatedPeer(key, facts)

    def connect(self) -> None:
        """Until each has a connection that carries both ways."""
        ask_s = 0.0

        def are_connected() -> bool:
            nonlocal ask_s
            missing = [peer for peer in self.all if not peer.is_connected]
            if time.monotonic() >= ask_s:
                ask_s = time.monotonic() + PAUSE_S
                for peer in missing:
                    self._says(peer.key, StatusQuery())
            return not missing

        self.until(are_connected, "connections of all peers")

    def greet(self) -> None:
        """All say Hello at once, until all are welcome."""
        for peer in self.all:
            peer.hello_s = peer.heard_s = time.monotonic()
            self._channel.send(peer.key, Hello(WIRE_VERSION, peer.facts))
        self.until(lambda: all(peer.welcomed_s for peer in self.all), "welcome of all peers")

    def leave(self) -> None:
        """All say Goodbye, until each is answered: the worker has forgotten them."""
        for peer in self.all:
            self._channel.send(peer.key, Goodbye("it greets again", is_quiet=True))
        self.until(lambda: not any(peer.welcomed_s for peer in self.all), "answers to goodbyes")

    def stay(self, seconds: float) -> None:
        """Peers of a worker, and nothing else, for so long."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.turn(min(left_s, POLL_S))

    def until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {self._timeout_s:g} s")
            self.turn(POLL_S)

    def turn(self, timeout_s: float) -> None:
        """Wait for mail, at most so long, and answer it; heartbeats when they are due."""
        letters = self._channel.poll(timeout_s)
        now_s = time.monotonic()
        self._channel.gather()
        for letter in letters:
            self._receive(letter, now_s)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self._beat()
        self._channel.let_go()
        self._check()

    def _beat(self) -> None:
        self._says(self._router, Heartbeat())
        for peer in self.all:
            if peer.welcomed_s:
                self._channel.send(peer.key, Heartbeat())
                self._channel.send(peer.key, RegionsAt(peer.facts.epoch, peer.facts.generation))

    def _says(self, key: str, message: Message) -> bool:
        """False where there is no connection yet."""
        try:
            self._channel.send(key, message)
        except ControlError:
            return False
        return True

    def _receive(self, letter: Letter, now_s: float) -> None:
        message, peer = letter.message, self._peers.get(letter.peer)
        if isinstance(message, Reject):
            raise HandshakeRejected(message.field, message.ours, message.theirs)
        if peer is None:
            self._answers[type(message)] = message
            return
        peer.hears(now_s)
        match message:
            case Status():
                peer.is_connected = True
            case Welcome(facts=facts):
                peer.welcomed_s = now_s
                self._channel.send(peer.key, RegionsAck(facts.generation))
            case RegionsUpdate(generation=generation):
                self._note(peer, generation, now_s)
                self._channel.send(peer.key, RegionsAck(generation))
            case RegionsRevoke(epoch=epoch):
                self._channel.send(peer.key, RegionsRevoked(epoch))
            case Goodbye():
                peer.welcomed_s = 0.0
            case HelloWanted():
                self.num_lost += 1
            case _:
                pass

    def _note(self, peer: SimulatedPeer, generation: int, now_s: float) -> None:
        if peer.key not in self.told[generation]:
            self.told[generation][peer.key] = self.told_s = now_s
