"""Agents of earlier epochs over NIXL: what they keep goes with them, and not before its time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from connectors.nixl import NixlConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

KIB = 1024
REGION = Region(0, 64 * KIB)
DEADLINE_S = 10.0
_names = count()


class Side:
    """A connector over memory of its own."""

    def __init__(self, name: str) -> None:
        self.bytes = np.zeros(REGION.size, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        window = MemoryWindow(self.base, REGION.size, "cpu")
        self.connector = NixlConnector(f"{name}-{os.getpid()}-{next(_names)}", window)
        self.connector.register([REGION])
        self.told = self.connector.describe([REGION])
        self.epoch = 0

    def renew(self) -> None:
        """A revocation of nothing."""
        self.epoch += 1
        self.told = self.connector.revoke([REGION], self.epoch)


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Side]]:
    monkeypatch.setenv("UCX_TLS", request.param)
    sides = [Side("left"), Side("right")]
    yield sides
    for side in sides:
        side.connector.close()


def meet(left: Side, right: Side) -> None:
    left.connector.connect("right", right.base, right.told)
    right.connector.connect("left", left.base, left.told)


def part(left: Side, right: Side) -> None:
    left.connector.disconnect("right")
    right.connector.disconnect("left")
    for side in (left, right):
        side.connector.poll()


def move(left: Side, right: Side) -> None:
    """Both read all of the other, one after the other."""
    column = np.zeros(1, dtype=np.int64)
    plan = TransferPlan.of_runs(column, column, column + REGION.size)
    for one, other, name in ((left, right, "right"), (right, left, "left")):
        other.bytes[:] = next(_names) % 251 + 1
        one.connector.submit(name, Direction.PULL, plan)
        deadline_s = time.monotonic() + DEADLINE_S
        while not (ended := one.connector.poll()):
            other.connector.poll()
            assert time.monotonic() < deadline_s
        assert [result.error for result in ended] == [None]
        assert (one.bytes == other.bytes).all()


def num_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def becomes_at_most(limit: int, *sides: Side) -> bool:
    """Whether so few files are open, in a while: connections are given time to be made first."""
    deadline_s = time.monotonic() + DEADLINE_S
    while num_files() > limit and time.monotonic() < deadline_s:
        for side in sides:
            side.connector.poll()
        time.sleep(0.02)
    return num_files() <= limit


def files_after(act: Callable[[], None]) -> int:
    for _ in range(5):
        act()
    return num_files()


transports = pytest.mark.parametrize("pair", ["tcp", "cma,posix,tcp"], indirect=True)


@transports
def test_what_lost_peers_left_behind_goes_with_the_agent(pair: list[Side]) -> None:
    left, right = pair
    meet(left, right)
    move(left, right)
    at_first = num_files()

    def lose_and_meet() -> None:
        part(left, right)
        meet(left, right)
        move(left, right)

    assert files_after(lose_and_meet) > at_first, "UCX has learnt to close; then drop the epochs"
    assert left.connector.wear == 5

    def renew() -> None:
        left.renew()
        right.connector.renew("left", left.base, left.told)
        left.connector.retire(())
        move(left, right)

    files_after(renew)
    assert becomes_at_most(at_first, left, right)
    assert left.connector.wear == 0


@transports
def test_an_agent_that_is_kept_serves_whoever_was_told_of_it(pair: list[Side]) -> None:
    """A peer that was lost and may live: ending the agent under its transfer is what kills."""
    left, right = pair
    meet(left, right)
    move(left, right)
    for _ in range(3):
        left.renew()
        left.connector.retire({0})
        move(left, right)
    files = num_files()
    right.connector.renew("left", left.base, left.told)
    left.connector.retire(())
    move(left, right)
    assert becomes_at_most(files - 1, left, right)


@pytest.mark.parametrize("initiates", [Direction.PULL, Direction.PUSH])
@pytest.mark.parametrize("lane", ["auto", "push", "pull"])
@transports
def test_one_end_alone_makes_a_connection_ahead_of_use(
    pair: list[Side], initiates: Direction, lane: str, request: pytest.FixtureRequest
) -> None:
    """Two that make one to each other at once abort the one whose peer dies meanwhile. The other
    makes one when it is asked for after all."""
    left, right = pair
    left.connector.initiates = initiates
    if lane != "auto":
        left.connector.expects = frozenset({Direction(lane)})
    reads = request.node.callspec.params["pair"] != "tcp"
    likely = Direction(lane) if lane != "auto" else Direction.PULL if reads else Direction.PUSH
    meet(left, right)
    (agent,) = (remote.agent for remote in left.connector._peers.values())
    assert left.connector._epoch.knows(agent) == (initiates is likely)
    left.renew()
    left.connector.poll()
    assert left.connector._epoch.knows(agent) == (initiates is likely)
    right.connector.renew("left", left.base, left.told)
    move(left, right)
    assert left.connector._epoch.knows(agent)
