"""Connectors of the staged way in one process, over a small ring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from connectors.staged import StagedConnector
from connectors.staged_agent import StagedAgent
from connectors.staged_link import Link
from connectors.staged_ring import ring_shape
from kvxfer.transfer.connector import MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

KIB, MIB = 1 << 10, 1 << 20
NUM_SLOTS = ring_shape("cpu", {}).num_slots
WINDOW_BYTES = 4 * MIB
RING_BYTES = 2 * NUM_SLOTS * 64 * KIB
WHOLE = Region(0, WINDOW_BYTES)
DEADLINE_S = 30.0
_names = count()


def plan_of(*runs: tuple[int, int, int]) -> TransferPlan:
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return TransferPlan.of_runs(*(column.copy() for column in columns))


SOME = plan_of((0, MIB, 300 * KIB))


@dataclass
class Side:
    """One of two in this process."""

    connector: StagedConnector
    name: str
    bytes: np.ndarray

    def meet(self, other: Side) -> None:
        told = other.connector.describe([WHOLE])
        self.connector.connect(other.name, int(other.bytes.ctypes.data), told)

    @classmethod
    def make(cls, name: str) -> Side:
        memory = np.zeros(WINDOW_BYTES, dtype=np.uint8)
        where = MemoryWindow(int(memory.ctypes.data), WINDOW_BYTES, "cpu")
        made = StagedConnector(f"{name}-{os.getpid()}-{next(_names)}", where)
        made.register([WHOLE])
        return cls(made, name, memory)


def until(done: Callable[[], bool], *connectors: StagedConnector) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        for one in connectors:
            one.poll()
        assert time.monotonic() < deadline
        time.sleep(0.0002)


def collect(mover: Side, tickets: set[int], *others: Side) -> dict[int, str | None]:
    """Poll until all of `mover`'s tickets have ended, each once; their errors."""
    ended: list[TicketResult] = []

    def have_ended() -> bool:
        ended.extend(mover.connector.poll())
        return len(ended) >= len(tickets)

    until(have_ended, *(side.connector for side in others))
    assert sorted(result.ticket for result in ended) == sorted(tickets)
    return {result.ticket: result.error for result in ended}


def check_slots_are_free(connector: StagedConnector) -> None:
    until(lambda: not connector.is_busy, connector)
    assert connector._engine.target.num_free == connector._engine.source.num_free == NUM_SLOTS


def fill(*windows: np.ndarray, seed: int = 1) -> None:
    for index, one in enumerate(windows):
        one[:] = np.random.default_rng(seed + index).integers(0, 256, len(one), dtype=np.uint8)


def talking(side: Side, other: Side) -> tuple[StagedAgent, Link]:
    """What `side` says messages of its own choice with, and its link to `other`."""
    side.meet(other)
    link = side.connector._engine.links.find(other.connector._name)
    assert link is not None
    until(lambda: link.is_ready, side.connector, other.connector)
    return side.connector._engine.site.agent, link
