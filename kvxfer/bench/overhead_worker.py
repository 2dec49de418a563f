"""`python -m kvxfer.bench.overhead_worker`: a decode worker that speaks the wire and nothing else.

It answers each prompt at once with its first token, and the others at a steady pace, so that what
is measured in front of it is the router's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass

from cyclopts import App

from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.facts import WorkerFacts
from kvxfer.control.messages import WIRE_VERSION, Heartbeat, Hello, Message, Welcome
from kvxfer.control.router_messages import (
    Cancel,
    Finished,
    Generate,
    Status,
    StatusQuery,
    Token,
    TransferStats,
)
from kvxfer.errors import ControlError

TOKEN = ord("x")
GRANULARITY = 4096


def facts() -> WorkerFacts:
    """Of a worker with no rank, which nobody could hand KV to."""
    spec = KVCacheSpec(1, 1, 16, 16, "float32", 16)
    return WorkerFacts(
        role="decode",
        worker_id="overhead-0",
        incarnation=secrets.token_hex(4),
        model="none",
        geometry=CacheGeometry.build([spec], [KVCacheLayout("LBHNC")], [16], GRANULARITY),
        ranks=[],
        lanes=[],
        local_lanes=[],
        host="",
        device="cpu",
        device_id="",
        tests_lanes=False,
        regions=[],
        generation=0,
        epoch=0,
    )


@dataclass
class _Prompt:
    peer: str
    name: str
    num_tokens: int
    num_told: int = 0


class Teller:
    """Prompts under way. A router that left is told nothing."""

    def __init__(self, channel: Channel, pace_s: float) -> None:
        """`pace_s`: between two tokens of an answer; 0 means at once."""
        self._channel = channel
        self._pace_s = pace_s
        self._next_s = 0.0
        self._facts = facts()
        self._prompts: dict[str, _Prompt] = {}

    def take(self, letter: Letter) -> None:
        match letter.message:
            case Hello():
                self._send(letter.peer, Welcome(WIRE_VERSION, self._facts, ""))
            case Heartbeat():
                self._send(letter.peer, Heartbeat())
            case StatusQuery():
                self._send(letter.peer, Status(self._facts.worker_id, {"peers": 1}))
            case Cancel(request_id=name):
                if (prompt := self._prompts.pop(name, None)) is not None:
                    self._end(prompt, "cancelled")
            case Generate(request_id=name, max_new_tokens=count):
                self._prompts[name] = _Prompt(letter.peer, name, count)
                self._tell(self._prompts[name])
            case _:
                pass

    def tick(self) -> None:
        """One more token of each, when it is time."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._pace_s
            for prompt in list(self._prompts.values()):
                self._tell(prompt)

    def _tell(self, prompt: _Prompt) -> None:
        self._send(prompt.peer, Token(prompt.name, prompt.num_told, TOKEN))
        prompt.num_told += 1
        if prompt.num_told == prompt.num_tokens:
            del self._prompts[prompt.name]
            self._end(prompt, "length")

    def _end(self, prompt: _Prompt, reason: str) -> None:
        told = prompt.num_told
        end = Finished(prompt.name, reason, "", 0, TransferStats(), [], told, 0.0)
        self._send(prompt.peer, end)

    def _send(self, peer: str, message: Message) -> None:
        with contextlib.suppress(ControlError):
            self._channel.send(peer, message)


def serve(*, ready_fd: int, pace_s: float = 0.0) -> int:
    """Until SIGTERM; the address goes to `ready_fd`, as that of every worker."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    channel = Channel(f"overhead.{secrets.token_hex(8)}", "tcp://127.0.0.1:0")
    try:
        line = json.dumps({"event": "listening", "address": channel.address})
        os.write(ready_fd, line.encode() + b"\n")
        teller = Teller(channel, pace_s)
        while True:
            for letter in channel.poll(pace_s / 4 or 0.5):
                teller.take(letter)
            teller.tick()
    finally:
        channel.close()


if __name__ == "__main__":
    App(default_command=serve, result_action="return_value")()
