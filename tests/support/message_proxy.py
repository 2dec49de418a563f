"""A real proxy between ZMQ ends, which loses, repeats, delays and reorders whole messages.

Messages are passed from a dialler to the one whose place this takes, and back, by a DEALER for each
dialler that bears its identity, as if it had dialled itself. Those of a batch go each by itself, so
that what befalls one spares the others.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass, field

import zmq

from kvxfer.control.wire import decode_frame, encode

POLL_MS = 5
GONE_S = 2.0
"""A dialler that is silent for longer is gone: heartbeats come more often."""


@dataclass(frozen=True)
class Faults:
    """What happens to each message, by its chance; delays in seconds, uniform up to the longest."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    longest_delay_s: float = 0.0
    """A delayed message lets those that follow overtake it."""
    hold_s: float = 0.0
    """Of every message, in order: a slow link."""


@dataclass
class Counts:
    passed: int = 0
    lost: int = 0
    repeated: int = 0
    delayed: int = 0
    reordered: int = 0


@dataclass(order=True)
class _Waiting:
    due_s: float
    number: int
    to: zmq.Socket[bytes] = field(compare=False)
    frames: list[bytes] = field(compare=False)


class MessageProxy:
    """Between whoever dials `address` and `target`. A context; a thread of its own. `faults` may
    be changed at any time, `is_cut` too: nothing passes then, and nothing is kept."""

    def __init__(self, target: str, port: int, seed: int = 0) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        self.faults = Faults()
        self.is_cut = False
        self.counts = Counts()
        self._target = target
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        self._newest: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxy")

    def __enter__(self) -> MessageProxy:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a dialler may come again under its name
        self._front.bind(self.address)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._heard_s: dict[bytes, float] = {}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10.0)
        self._context.destroy(linger=0)
        assert not self._thread.is_alive()

    def _main(self) -> None:
        while not self._stopping.is_set():
            poller = zmq.Poller()
            poller.register(self._front, zmq.POLLIN)
            for back in self._backs.values():
                poller.register(back, zmq.POLLIN)
            ready = dict(poller.poll(POLL_MS if not self._waiting else 1))
            if self._front in ready:
                for identity, frame in _drain(self._front):
                    self._heard_s[identity] = time.monotonic()
                    for message in decode_frame(frame):
                        self._pass(self._back(identity), [encode(message)])
            for identity, back in list(self._backs.items()):
                if back in ready:
                    for (frame,) in _drain(back):
                        for message in decode_frame(frame):
                            self._pass(self._front, [identity, encode(message)])
            self._deliver()
            self._forget()

    def _forget(self) -> None:
        """End the connections of diallers that are gone, as they would themselves."""
        oldest_s = time.monotonic() - GONE_S
        for identity in [one for one in self._backs if self._heard_s[one] < oldest_s]:
            back = self._backs.pop(identity)
            self._waiting = [one for one in self._waiting if one.to is not back]
            heapq.heapify(self._waiting)
            back.close(linger=0)

    def _back(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.IDENTITY, identity)
            back.connect(self._target)
            self._backs[identity] = back
        return self._backs[identity]

    def _pass(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        faults, draw = self.faults, self._random.random
        if self.is_cut or draw() < faults.lose:
            self.counts.lost += 1
            return
        num_copies = 1 + (draw() < faults.repeat)
        self.counts.repeated += num_copies - 1
        for _ in range(num_copies):
            due_s = time.monotonic() + faults.hold_s
            if draw() < faults.delay:
                due_s += self._random.uniform(0, faults.longest_delay_s)
                self.counts.delayed += 1
            heapq.heappush(self._waiting, _Waiting(due_s, next(self._numbers), to, frames))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0].due_s <= now:
            one = heapq.heappop(self._waiting)
            self.counts.reordered += one.number < self._newest.get(id(one.to), -1)
            self._newest[id(one.to)] = max(one.number, self._newest.get(id(one.to), -1))
            with contextlib.suppress(zmq.ZMQError):  # whom it is for is gone
                one.to.send_multipart(one.frames, zmq.NOBLOCK)
                self.counts.passed += 1


def _drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    found = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
    return found
