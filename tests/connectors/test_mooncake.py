"""Mooncake's engine beyond what every connector does: who answers, what is missing, what is left.

The contract's own tests move bytes with it. Skipped where the engine is not installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.peer_processes import MIB, MakePeer

from connectors import mooncake_engine
from connectors.mooncake import MooncakeAgent, MooncakeConnector
from connectors.mooncake_session import MOST_UNDER_WAY, Told
from kvxfer.bench.transfer_devices import why_no_connector
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.connector import Direction, MemoryWindow, load_connector
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import Description
from kvxfer.transfer.regions import Region

SIZE = MIB
ALL = Region(0, SIZE)
DEADLINE_S = 20.0
ENDING_S = 0.6
"""An engine whose listener waits for a second ends after half of one on average."""

needs_engine = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def engine() -> None:
    """Skips where it is not installed. Loading it starts threads, so not while tests are found."""
    if reason := MooncakeConnector.why_missing():
        pytest.skip(reason)


class End:
    """A connector over all of an array."""

    def __init__(self, name: str, fill: int) -> None:
        self.bytes = np.full(SIZE, fill, dtype=np.uint8)
        self.window = MemoryWindow(int(self.bytes.ctypes.data), SIZE, "cpu")
        self.connector = MooncakeConnector(name, self.window)
        self.connector.register([ALL])

    def told(self) -> bytes:
        return self.connector.describe([ALL])

    def learn(self, other: End, told: bytes) -> None:
        self.connector.connect("other", other.window.base_address, told)

    def pull(self, num_runs: int = 1) -> str | None:
        """All of the other's, in so many runs: what went wrong, if anything."""
        sizes = np.full(num_runs, SIZE // num_runs, dtype=np.int64)
        offsets = np.arange(num_runs, dtype=np.int64) * (SIZE // num_runs)
        plan = TransferPlan.of_runs(offsets, offsets, sizes)
        ticket = self.connector.submit("other", Direction.PULL, plan)
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            for result in self.connector.poll():
                assert result.ticket == ticket
                return result.error
            time.sleep(0.0005)
        raise TimeoutError(f"no end in {DEADLINE_S:g} s")


@pytest.fixture
def make_end() -> Iterator[Callable[[int], End]]:
    made: list[End] = []

    def make(fill: int) -> End:
        made.append(End(f"end-{time.monotonic_ns()}", fill))
        return made[-1]

    yield make
    for one in made:
        one.connector.close()


@pytest.fixture
def ends(make_end: Callable[[int], End]) -> tuple[End, End]:
    """One that has not met the other yet."""
    return make_end(1), make_end(2)


def with_told(description: bytes, **changes: Any) -> bytes:
    """The same description of another engine."""
    known = Description.from_bytes(description)
    told = msgspec.msgpack.decode(known.transport, type=Told)
    changed = msgspec.structs.replace(told, **changes)
    return msgspec.structs.replace(known, transport=msgspec.msgpack.encode(changed)).to_bytes()


@needs_engine
def test_an_engine_that_is_not_the_one_told_of_moves_nothing(ends: tuple[End, End]) -> None:
    left, right = ends
    left.learn(right, with_told(right.told(), mark=bytes(32)))
    error = left.pull()
    assert error is not None and "another process" in error
    assert (left.bytes == 1).all()


@needs_engine
def test_nobody_where_an_engine_should_be_ends_the_ticket(ends: tuple[End, End]) -> None:
    left, right = ends
    left.learn(right, with_told(right.told(), address="127.0.0.1:1"))
    error = left.pull()
    assert error is not None and "127.0.0.1:1" in error


@needs_engine
def test_metadata_that_says_nothing_of_an_engine_is_refused(ends: tuple[End, End]) -> None:
    left, right = ends
    empty = msgspec.structs.replace(Description.from_bytes(right.told()), transport=b"\xc0")
    with pytest.raises(ConnectorError, match="description of agent"):
        left.learn(right, empty.to_bytes())


@needs_engine
def test_the_owner_refuses_what_it_deregistered_and_the_next_transfer_moves(
    ends: tuple[End, End],
) -> None:
    left, right = ends
    left.learn(right, right.told())
    assert left.pull(2 * MOST_UNDER_WAY) is None
    right.connector.deregister([ALL])
    left.bytes[:] = 1
    error = left.pull(2 * MOST_UNDER_WAY)
    assert error is not None and "no longer registered" in error
    assert (left.bytes == 1).all()
    right.connector.register([ALL])
    assert left.pull() is None
    assert (left.bytes == 2).all()


@needs_engine
def test_a_closed_connector_leaves_neither_threads_nor_descriptors(
    make_end: Callable[[int], End],
) -> None:
    first = [make_end(fill) for fill in (1, 2)]  # what loading the engine starts stays
    settle(first)
    before = left_over()
    more = [make_end(fill) for fill in (3, 4)]
    settle(more)
    start_s = time.monotonic()
    for one in more:
        one.connector.close()
    assert time.monotonic() - start_s < 2 * ENDING_S
    deadline_s = time.monotonic() + 5
    while left_over() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert left_over() <= before


def settle(ends: list[End]) -> None:
    ends[0].learn(ends[1], ends[1].told())
    assert ends[0].pull() is None
    for one in ends[::-1]:
        one.connector.disconnect("other")
    time.sleep(0.2)


def left_over() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


@needs_engine
def test_a_device_that_the_package_does_not_move_is_refused() -> None:
    if mooncake_engine.load_engine().SUPPORT_CUDA:
        pytest.skip("this package moves GPU memory")
    window = replace(MemoryWindow(0, SIZE, "cpu"), device="cuda:0")
    with pytest.raises(UsageError, match="host memory only"):
        MooncakeAgent("gpu", window)


@pytest.fixture
def fresh_loading() -> Iterator[None]:
    mooncake_engine.load_engine.cache_clear()
    yield
    mooncake_engine.load_engine.cache_clear()


@pytest.mark.usefixtures("fresh_loading")
def test_a_missing_package_is_named_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(UsageError, match=r"connector: 'mooncake'.*kvxfer\[mooncake\]"):
        load_connector("mooncake")
    assert "kvxfer[mooncake]" in why_no_connector("mooncake")


@pytest.mark.usefixtures("fresh_loading")
def test_a_framing_whose_writes_are_not_acknowledged_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(UsageError, match="MC_TCP_PROTO"):
        mooncake_engine.load_engine()


@pytest.mark.parametrize(
    ("found", "is_good"),
    [("0.3.13.post1", True), ("1.0", True), ("0.3.12", False), ("0.3", False), ("", False)],
)
def test_older_engines_are_refused(found: str, is_good: bool) -> None:
    if is_good:
        mooncake_engine._check_version(found)
        return
    with pytest.raises(UsageError, match=r"needs 0\.3\.13"):
        mooncake_engine._check_version(found)


def test_peers_are_told_the_host_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mooncake_engine.HOST, "127.0.0.1")
    assert mooncake_engine.own_host() == "127.0.0.1"
    monkeypatch.setenv(mooncake_engine.HOST, "no host at all")
    with pytest.raises(UsageError, match=mooncake_engine.HOST):
        mooncake_engine.own_host()


@needs_engine
@pytest.mark.slow
def test_an_owner_killed_under_a_transfer_ends_it_and_a_reader_killed_harms_nobody(
    make_peer: MakePeer,
) -> None:
    size = 64 * MIB
    owner, reader, later = (make_peer(size, seed, connector="mooncake") for seed in (1, 2, 3))
    told = owner.ask("grow", [0, size])
    for one in (reader, later):
        one.ask("grow", [0, size])
        one.meet(owner, told)
    runs = [[start, start, MIB // 16] for start in range(0, size, MIB // 16)]
    reader.ask("start", "owner", runs)
    reader.kill()
    assert later.ask("pull", "owner", [[0, 0, size]]) is None
    assert later.ask("digest", 0, size) == owner.ask("digest", 0, size)
    ticket = later.ask("start", "owner", runs)
    assert ticket
    owner.kill()
    error = later.ask("pull", "owner", [[0, 0, MIB]])
    assert error is not None and "Mooncake" in error
