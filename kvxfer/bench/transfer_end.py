"""One of the two processes between which a transfer bench moves KV: a cache and a connector.

It does what its parent asks, and in between lets its connector serve the other end. Times are
those of the end that starts a transfer, from `submit` to the poll that reports it complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch

from kvxfer.bench.scratch import driver_of, use_device
from kvxfer.bench.transfer_fill import clear, fill, is_filled
from kvxfer.bench.transfer_gauge import Gauge
from kvxfer.bench.transfer_words import OTHER, CacheSetup, Contact, Move, Planned
from kvxfer.cache.budget import open_files_needed
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import ConnectorError, DeadlineExceeded, TransferError
from kvxfer.memory.chunks import LARGEST_CHUNK, Chunk
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, load_connector
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

MOVE_TIMEOUT_S = 60.0
HOST_PAUSE_S = 50e-6
"""Between polls, where a thread of the connector may be copying: it needs the core, or the GIL."""
_LIVES = count(1)


class End:
    """The source's or the target's process. One cache and one connector at a time."""

    def __init__(self, role: str, device: str) -> None:
        self.role = role
        self.device = device
        self._gauge = Gauge()
        self._cache_stack = ExitStack()
        self._lane_stack = ExitStack()
        self._cache: KVCache | None = None
        self._connector: Connector | None = None
        self._regions = RegionSet()
        self._peer: Contact | None = None
        self._plan: tuple[Direction, TransferPlan] | None = None
        use_device(device)
        # Two processes, and what the connectors run beside: threads that wait for a core cost more.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 4))

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise TransferError(f"{self.role} has no cache open")
        return self._cache

    @property
    def connector(self) -> Connector:
        if self._connector is None:
            raise TransferError(f"{self.role} has no connector open")
        return self._connector

    def open_cache(self, setup: CacheSetup) -> None:
        """All blocks that are to be committed are; what was open before is closed."""
        self.close()
        driver = FixedDriver(self.device) if setup.fixed else driver_of(self.device)
        geometry = CacheGeometry.build(
            [shape.spec for shape in setup.shapes],
            [shape.layout for shape in setup.shapes],
            setup.capacity,
            driver.granularity,
        )
        if self.device == "cpu":
            groups = geometry.groups
            ensure_open_files(
                sum(open_files_needed(g, g.capacity_blocks, LARGEST_CHUNK) for g in groups)
            )
        self._cache = KVCache(driver, geometry)
        self._cache_stack.callback(self._cache.close)
        self._cache.extend(setup.committed)

    def open_connector(self, name: str, environment: Mapping[str, str]) -> Contact:
        """Over all that is committed. `environment` holds while the connector is made; another
        one that was open before is closed."""
        self.close_connector()
        buffer, device = self.cache.buffer, self.device
        shared = None if isinstance(buffer.driver, FixedDriver) else buffer
        window = MemoryWindow(buffer.base_address, buffer.size_bytes, device, shared)
        with _environment(environment):
            made = load_connector(name)(f"bench.{self.role}.{os.getpid()}.{next(_LIVES)}", window)
        self._lane_stack.callback(made.close)
        self._connector = made
        regions = _regions_of(buffer.chunks)
        made.register(regions)
        self._lane_stack.callback(made.deregister, regions)
        self._regions = RegionSet(tuple(sorted(regions)), 1)
        return Contact(
            base_address=buffer.base_address,
            geometry=self.cache.geometry,
            regions=self._regions,
            description=made.describe(regions),
            invitation=made.invite(),
            directions=made.directions,
        )

    def connect(self, peer: Contact) -> None:
        """Learn the other end, if transfers with it can start here."""
        self._peer = peer
        initiates = Direction.PUSH if self.role == "source" else Direction.PULL
        if initiates in self.connector.directions:
            name, base = OTHER[self.role], peer.base_address
            self.connector.connect(name, base, peer.description, peer.invitation)

    def write(self, group: int, blocks: Sequence[int], seed: int) -> None:
        fill(self.cache.views[group], blocks, seed)
        self._settle()

    def erase(self, group: int, blocks: Sequence[int]) -> None:
        clear(self.cache.views[group], blocks)
        self._settle()

    def check(self, group: int, blocks: Sequence[int], seed: int) -> bool:
        return is_filled(self.cache.views[group], blocks, seed)

    def plan(self, move: Move, with_runs: bool) -> Planned:
        """Plan what the next `run` moves; `with_runs` down to descriptors, for those who need
        them: else a connector that does makes them while its time is taken."""
        start = time.perf_counter()
        made = self.plan_of(move)
        if with_runs:
            _ = made.runs
        seconds = time.perf_counter() - start
        self._plan = (move.direction, made)
        return Planned(made.total_bytes, seconds)

    def plan_of(self, move: Move) -> TransferPlan:
        if self._peer is None:
            raise TransferError(f"{self.role} knows no peer")
        ours = (self.cache.geometry, self._regions)
        theirs = (self._peer.geometry, self._peer.regions)
        src, dst = (ours, theirs) if self.role == "source" else (theirs, ours)
        group = src[0].groups[move.src_group]
        tokens = range(len(move.src_blocks) * group.spec.block_size)
        return plan_transfer(
            CacheSide(group, src[1], move.src_blocks),
            CacheSide(dst[0].groups[move.dst_group], dst[1], move.dst_blocks),
            tokens,
        )

    def run(self) -> float:
        """Move what was planned; returns seconds."""
        if self._plan is None:
            raise TransferError(f"{self.role} has no plan")
        direction, plan = self._plan
        start = time.perf_counter()
        self.finish(self.connector.submit(OTHER[self.role], direction, plan))
        return time.perf_counter() - start

    def finish(self, ticket: int) -> None:
        """Poll until `ticket`, the only one, ended. Raises ConnectorError if badly."""
        deadline_s = time.monotonic() + MOVE_TIMEOUT_S
        while not (ended := self.connector.poll()):
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"a transfer took more than {MOVE_TIMEOUT_S:g} s")
            self.pause()
        if [result.ticket for result in ended] != [ticket]:
            raise ConnectorError(f"tickets {ended} ended, not {ticket} alone")
        if ended[0].error is not None:
            raise ConnectorError(f"a transfer failed: {ended[0].error}")

    def pause(self) -> None:
        """Let others run; on a GPU no longer than that, which a sleep would."""
        time.sleep(HOST_PAUSE_S if self.device == "cpu" else 0)

    def gauge(self, source: str, target: str, size_bytes: int) -> float:
        """Seconds of the machine's own copy."""
        return self._gauge.seconds(source, target, size_bytes)

    def serve_peer(self) -> None:
        """Let the connector do what the other end needs of us."""
        if self._connector is not None and self._connector.poll():
            raise ConnectorError(f"{self.role}: a transfer ended that nobody waits for")

    def disconnect(self) -> None:
        """Let go of the other end, whose memory goes next."""
        if self._connector is not None:
            self._connector.disconnect(OTHER[self.role])
            self._connector.poll()

    def close_connector(self) -> None:
        self._connector, self._peer, self._plan = None, None, None
        self._lane_stack.close()

    def close(self) -> None:
        """Give back connector and cache. Idempotent."""
        self.close_connector()
        self._cache = None
        self._cache_stack.close()
        self._gauge.close()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        """Wait for what was launched: another process reads it next."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def _regions_of(chunks: Sequence[Chunk]) -> list[Region]:
    return [Region(chunk.offset, chunk.size) for chunk in chunks]


def _environment(wanted: Mapping[str, str]) -> Any:
    """A context in which the variables of `wanted` have its values."""
    stack = ExitStack()
    for name, value in wanted.items():
        before = os.environ.get(name)
        if before is None:
            stack.callback(os.environ.pop, name, None)
        else:
            stack.callback(os.environ.__setitem__, name, before)
        os.environ[name] = value
    return stack
