"""A peer that is met, granted or leased blocks, and then cut off, while its transport goes on with
the descriptors that it has. What a child of the fork server runs, and the test's end of it.

It plays prefill or decode message by message (`WirePeer`) with a real NIXL agent, and is told what
to do over a socket, one JSON object a message. It never writes anything but NaN, whose every trace
in other people's KV shows in their tokens and digests.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.fork_server import ForkServer
from support.null_process import SPEC, null_engine
from support.service import PEER_TIMEOUT_S
from support.service_processes import RouterProcess, until
from support.wire_peer import WirePeer

from connectors.nixl import NixlConnector
from kvxfer.config import WorkerOptions
from kvxfer.control.messages import (
    Grant,
    Heartbeat,
    Hello,
    PrefillRequest,
    Ready,
    RegionsAck,
    RegionsUpdate,
    Welcome,
)
from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region
from kvxfer.worker.engine import Engine
from kvxfer.worker.process import end_with_parent

PIECE_BYTES = 1024
"""A page of the service's cache, and a quarter of its granule."""
LAYERS = range(SPEC.num_layers)
TRANSFER_TIMEOUT_S = 10.0
HELLO_PAUSE_S = 0.1


def engine(options: WorkerOptions, incarnation: str, initiates: Direction) -> Engine:
    connectors = {"nixl": NixlConnector}
    return null_engine(options, connectors, incarnation, None, initiates=initiates)


class StalePeer:
    """In the child. One thread."""

    def __init__(self, order: dict[str, Any]) -> None:
        role = order["role"]
        self._dials = order.get("dial", "")
        initiates = Direction.PUSH if role == "prefill" else Direction.PULL
        self.wire = WirePeer(
            role,
            order.get("listen"),
            engine=partial(engine, initiates=initiates),
            **order["options"],
        )
        if self._dials:
            self.wire.key = self.wire.channel.dial(self._dials)
        self._say_at_s = 0.0
        self._is_cut_off = False
        self._known: list[Region] = []
        self._striking: list[Region] = []
        self._ways: Iterator[Direction] = itertools.cycle(Direction)
        self._struck: dict[str, int] = {}
        self._in_flight = 0
        self._way = Direction.PUSH

    # --- what a peer does ---------------------------------------------------------------------

    def turn(self) -> None:
        self._strike()
        if self._is_cut_off:
            return
        seen = len(self.wire.received)
        self.wire.turn()
        for message in self.wire.received[seen:]:
            if isinstance(message, Hello):
                assert message.facts is not None
                self.wire.send(self.wire.welcome(self.wire.options.lane))
                self._learn(message.facts)
                self.wire.send(RegionsAck(message.facts.generation))
            elif isinstance(message, Welcome):
                self._learn(message.facts)
            elif isinstance(message, RegionsUpdate):
                raise AssertionError("the cache under test is whole from the start")
        if time.monotonic() >= self._say_at_s:
            self._say_at_s = time.monotonic() + HELLO_PAUSE_S
            if self._known:
                self.wire.send(Heartbeat())
            elif self._dials:
                self.wire.says(self.wire.hello())

    def _learn(self, facts: Any) -> None:
        (rank,) = facts.ranks
        self.wire.connector.connect("victim", rank.base_address, rank.description)
        self._known = list(facts.regions)

    # --- orders -------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """What it has been told so far: places (offset, size) of all regions, and of blocks that
        were granted or leased to it."""
        asked, offers = self.wire.of(PrefillRequest), self.wire.of(Ready)
        granted = [one.grant.blocks for one in asked if one.grant.blocks is not None]
        leased = [one.lease.blocks for one in offers]
        blocks = {block for (ids,) in (*granted, *leased) for block in ids}
        return {
            "regions": [(one.offset, one.size) for one in self._known],
            "blocks": [
                (self._offset(layer, one), PIECE_BYTES) for layer in LAYERS for one in blocks
            ],
        }

    def _offset(self, layer: int, block: int) -> int:
        cache = self.wire.cache
        return cache.views[0][layer][block].data_ptr() - cache.buffer.base_address

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """As decode: have a prompt prefilled, whose KV it never takes."""
        blocks = list(range(4, 4 + -(-len(tokens) // 4)))
        self.wire.send(
            PrefillRequest("s", tokens, Sampling(), Grant("g", [blocks], 30.0, 0), False)
        )
        return {}

    def cut_off(self) -> dict[str, Any]:
        """It hears and says nothing from now on."""
        self._is_cut_off = True
        return {}

    def strike(self, places: list[list[int]], ways: list[str]) -> dict[str, Any]:
        """Go for the victim's bytes (offset, size) again and again, one place and way at a time."""
        self._striking = [Region(*place) for place in places]
        self._ways = itertools.cycle([Direction(way) for way in ways])
        self._struck = {f"{way} {how}": 0 for way in ways for how in ("landed", "failed")}
        return {}

    def rest(self) -> dict[str, Any]:
        """Stop, once the last one has ended: how they ended since `strike`, counted."""
        deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
        self._striking = []
        while self._in_flight:
            assert time.monotonic() < deadline_s, "a transfer did not end"
            self._strike()
        return dict(self._struck)

    def _strike(self) -> None:
        connector = self.wire.connectors["nixl"]
        for result in connector.poll():
            self._in_flight -= 1
            self._count("failed" if result.error else "landed")
        if self._in_flight or not self._striking:
            return
        self._way = next(self._ways)
        self.wire.cache.views[0][0][0] = torch.nan  # the first page, which a read may have changed
        for place in self._striking:
            try:
                connector.submit("victim", self._way, plan(self._way, place))
                self._in_flight += 1
            except ConnectorError:
                self._count("failed")
        time.sleep(0.001)  # the machine is others', too

    def _count(self, how: str) -> None:
        self._struck[f"{self._way} {how}"] += 1


def plan(way: Direction, place: Region) -> TransferPlan:
    """All of a place: NaN into it, or what is there into the same place of its own."""
    theirs = np.arange(place.offset, place.end, PIECE_BYTES, dtype=np.int64)
    sizes = np.full_like(theirs, PIECE_BYTES)
    source = np.zeros_like(theirs) if way is Direction.PUSH else theirs
    return TransferPlan.of_runs(source, theirs, sizes)


def run_stale(order: dict[str, Any], fd: int) -> int:
    end_with_parent()
    with socket.socket(fileno=fd) as told:
        told.setblocking(False)
        peer = StalePeer(order)
        while True:
            try:
                data = told.recv(1 << 16)
                if not data:
                    return 0
                given = json.loads(data)
                answer = getattr(peer, given.pop("do"))(**given)
                told.send(json.dumps(answer).encode())
            except BlockingIOError:
                peer.turn()
                time.sleep(0.0005)


class Stale(RouterProcess):
    """The test's end."""

    def __init__(self, server: ForkServer, log: Path, environment: dict[str, str], **order: Any):
        options = {
            "connector": "nixl",
            "worker_id": "stale-9",
            "peer_timeout_s": PEER_TIMEOUT_S,
            **order.pop("options"),
        }
        common = {"stale": True, "namespaces": {}, "environment": environment}
        super().__init__(server, {**common, **order, "options": options}, log)

    def do(self, order: str, **given: Any) -> dict[str, Any]:
        self.socket.settimeout(2 * TRANSFER_TIMEOUT_S)
        self.socket.send(json.dumps({"do": order, **given}).encode())
        data = self.socket.recv(1 << 16)
        assert data, f"it ended:\n{self.tail()}"
        answer: dict[str, Any] = json.loads(data)
        return answer

    def until_it_has(self, what: str, timeout_s: float = 10.0) -> Any:
        """`regions`, once it was met, or `blocks`, once it was granted or leased some."""
        until(lambda: bool(self.do("look")[what]), timeout_s, f"the stale peer has {what}")
        return self.do("look")[what]
