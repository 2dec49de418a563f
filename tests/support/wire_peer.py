"""A peer that a test plays message by message, over a real channel and with real memory."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from support.workers import Worker, make_engine, make_options

from kvxfer.cache.kv_cache import KVCache
from kvxfer.control.auth import Keys
from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.control.channel import Channel
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import WIRE_VERSION, Hello, Message, RegionsAck, RegionsUpdate, Welcome
from kvxfer.errors import ControlError
from kvxfer.memory.limits import host_identity
from kvxfer.transfer.connector import Connector
from kvxfer.transfer.lanes import offered
from kvxfer.transfer.regions import Region, RegionSet


class WirePeer:
    """Says what the test tells it to; `received` is what it was told. Its whole cache is committed
    and registered with a real connector, so that the worker under test can reach it."""

    def __init__(self, role: str, listen: str | None = None, **changes: Any) -> None:
        """`engine` in `changes`: what `make_engine` is given, or what makes another one."""
        engine = changes.pop("engine", {})
        self.role = role
        self.options = make_options(role, **changes)
        self.incarnation = secrets.token_hex(4)
        keys = Keys.load(self.options.key_file, self.options.peer_keys)
        self.channel = Channel(f"{self.options.worker_id}.{self.incarnation}", listen, keys)
        make = engine if callable(engine) else partial(make_engine, **engine)
        self.engine = make(self.options, self.incarnation)
        self.key = ""
        self.acks = True
        """Whether it acknowledges regions by itself."""
        self.received: list[Message] = []
        self.cache.extend([group.capacity_blocks for group in self.cache.geometry.groups])
        chunks = [Region(chunk.offset, chunk.size) for chunk in self.cache.buffer.chunks]
        self.engine.connector.register(chunks)
        self.regions = RegionSet().add(chunks)

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def connector(self) -> Any:
        return self.engine.connector

    @property
    def connectors(self) -> dict[str, Connector]:
        return self.engine.connector.connectors

    @property
    def address(self) -> str:
        return self.channel.address

    def facts(self, **changes: Any) -> WorkerFacts:
        """`changes` are fields of WorkerFacts, or of its one RankFacts."""
        regions = list(self.regions.regions)
        known: dict[str, Any] = {
            "role": self.role,
            "worker_id": self.options.worker_id,
            "incarnation": self.incarnation,
            "model": self.engine.info.fingerprint,
            "geometry": self.cache.geometry,
            "ranks": [self._rank(regions, changes)],
            "lanes": [str(lane) for lane in offered(self.connectors, self.options.lane)],
            "local_lanes": [],
            "host": host_identity(),
            "device": "cpu",
            "device_id": "",
            "tests_lanes": self.options.lane_test,
            "regions": regions,
            "generation": self.regions.generation,
            "epoch": 0,
            "max_model_len": self.engine.max_model_len,
        }
        return WorkerFacts(**known | changes)

    def _rank(self, regions: list[Region], changes: dict[str, Any]) -> RankFacts:
        known: dict[str, Any] = {
            "base_address": self.cache.buffer.base_address,
            "description": self.engine.connector.describe(regions),
            "invitations": [self.engine.connector.invite()],
        }
        return RankFacts(**{name: changes.pop(name, value) for name, value in known.items()})

    def dial(self, worker: Worker) -> None:
        self.key = self.channel.dial(worker.address)

    def hello(self, **changes: Any) -> Hello:
        return Hello(WIRE_VERSION, self.facts(**changes))

    def welcome(self, direction: str, **changes: Any) -> Welcome:
        connector = next(iter(self.connectors))
        return Welcome(WIRE_VERSION, self.facts(**changes), f"{connector}/{direction}")

    def send(self, message: Message) -> None:
        """To whom we dialled, or who last spoke to us."""
        self.channel.send(self.key, message)

    def says(self, message: Message) -> bool:
        """`send`, where there may be no connection yet: False then."""
        try:
            self.send(message)
        except ControlError:
            return False
        return True

    def turn(self) -> None:
        for letter in self.channel.poll(0.0):
            self.key = letter.peer
            self.received.append(letter.message)
            if self.acks and isinstance(letter.message, RegionsRevoke):
                self.send(RegionsRevoked(letter.message.epoch))
            if self.acks and isinstance(letter.message, RegionsUpdate | Welcome):
                self._acknowledge(letter.message)

    def _acknowledge(self, message: RegionsUpdate | Welcome) -> None:
        if isinstance(message, Welcome):
            self.send(RegionsAck(message.facts.generation))
        else:
            self.send(RegionsAck(message.generation))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def close(self) -> None:
        self.channel.close()
        self.engine.connector.close()
        self.engine.close()
