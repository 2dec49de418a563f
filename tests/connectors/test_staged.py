"""The staged way with a peer in another process. The rest: the connector contract."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support.box_cases import layout_case
from support.fork_server import ForkServer, PipedCommand
from support.planning import bytes_of_boxes
from support.staged_sides import (
    DEADLINE_S,
    RING_BYTES,
    WHOLE,
    WINDOW_BYTES,
    check_slots_are_free,
    fill,
)

from connectors import staged_engine
from connectors.staged import StagedConnector
from connectors.staged_ring import STAGING_BYTES
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan

PEER_SCRIPT = Path(__file__).with_name("staged_peer.py")
_names = count()

SPEC = KVCacheSpec(4, 4, 32, 32, "float16", 16)
"""32 KiB a block; 128 bytes of a head and token."""


def tiny_runs() -> TransferPlan:
    """20,000 runs of 100 bytes at places that no box describes."""
    rng = np.random.default_rng(5)
    places = [rng.permutation(WINDOW_BYTES // 100)[:20_000] * 100 for _ in range(2)]
    return TransferPlan.of_runs(*places, np.full(20_000, 100, dtype=np.int64))


PLANS = (
    *(
        TransferPlan(layout_case(SPEC, KVCacheLayout[src], KVCacheLayout[dst], 40, tokens).boxes)
        for src, dst, tokens in (
            ("LBHNC", "LBHNC", range(3, 630)),
            ("BLHNC", "LBNHC", range(640)),
        )
    ),
    tiny_runs(),
)
"""Equal layouts, unequal ones, and no layout at all."""


@dataclass
class Peer:
    """The other process and its window, which this process sees through a shared file."""

    process: PipedCommand
    bytes: np.ndarray
    base: int
    description: bytes

    def revoke(self) -> None:
        self.process.stdin.write("revoke\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "\n"


StartPeer = Callable[[], Peer]


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGING_BYTES, str(RING_BYTES))


@pytest.fixture
def start_peer(tmp_path: Path, fork_server: ForkServer) -> Iterator[StartPeer]:
    processes: list[PipedCommand] = []

    def start() -> Peer:
        path = tmp_path / f"window-{len(processes)}"
        path.touch()
        os.truncate(path, WINDOW_BYTES)
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
        name = f"peer-{os.getpid()}-{next(_names)}"
        process = fork_server.pipe(PEER_SCRIPT, str(path), "staged", name)
        processes.append(process)
        ready = json.loads(process.stdout.readline())
        memory = np.frombuffer(shared, dtype=np.uint8)
        return Peer(process, memory, ready["base"], bytes.fromhex(ready["description"]))

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def window() -> np.ndarray:
    return np.zeros(WINDOW_BYTES, dtype=np.uint8)


@pytest.fixture
def connector(window: np.ndarray) -> Iterator[StagedConnector]:
    memory = MemoryWindow(int(window.ctypes.data), WINDOW_BYTES, "cpu")
    made = StagedConnector(f"here-{os.getpid()}-{next(_names)}", memory)
    made.register([WHOLE])
    yield made
    made.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes. Must stand before `connector`."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def finish(connector: StagedConnector, *tickets: int) -> dict[int, str | None]:
    """Poll until all of the tickets have ended, each once; their errors."""
    ended: list[TicketResult] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < len(tickets):
        ended += connector.poll()
        assert time.monotonic() < deadline, f"{len(ended)} of {len(tickets)} ended"
        time.sleep(0.0002)
    assert sorted(result.ticket for result in ended) == sorted(tickets)
    return {result.ticket: result.error for result in ended}


def moved(plan: TransferPlan, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    origins, places = bytes_of_boxes(plan.boxes)
    after = target.copy()
    after[places] = source[origins]
    return after


def check_both_ways(
    connector: StagedConnector, window: np.ndarray, peer: Peer, plan: TransferPlan
) -> None:
    """Push into the peer and pull from it, and check every byte of both windows."""
    for direction in Direction:
        fill(window, peer.bytes)
        is_push = direction is Direction.PUSH
        source, target = (window, peer.bytes) if is_push else (peer.bytes, window)
        wanted, before = moved(plan, source, target), source.copy()
        ticket = connector.submit("peer", direction, plan)
        assert finish(connector, ticket) == {ticket: None}
        np.testing.assert_array_equal(target, wanted)
        np.testing.assert_array_equal(source, before)


def test_a_peer_killed_under_transfers(
    over_tcp: None, start_peer: StartPeer, connector: StagedConnector, window: np.ndarray
) -> None:
    peer = start_peer()
    connector.connect("peer", peer.base, peer.description)
    for plan in PLANS:
        check_both_ways(connector, window, peer, plan)
    peer.process.send_signal(signal.SIGSTOP)
    tickets = [connector.submit("peer", way, tiny_runs()) for way in Direction]
    assert connector.poll() == []
    peer.process.kill()
    ended = finish(connector, *tickets)
    assert all(error and "NIXL" in error for error in ended.values()), ended
    check_slots_are_free(connector)
    with pytest.raises(ConnectorError, match="peer was lost"):
        connector.submit("peer", Direction.PULL, tiny_runs())


def test_a_peer_that_stops_revokes_and_closes(
    start_peer: StartPeer,
    connector: StagedConnector,
    window: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = start_peer()
    connector.connect("peer", peer.base, peer.description)
    for plan in PLANS:
        check_both_ways(connector, window, peer, plan)

    with monkeypatch.context() as patch:
        patch.setattr(staged_engine, "SILENCE_S", 0.3)
        peer.process.send_signal(signal.SIGSTOP)
        tickets = [connector.submit("peer", way, tiny_runs()) for way in Direction]
        assert all("said nothing" in str(error) for error in finish(connector, *tickets).values())
        window[:] = 1
        peer.process.send_signal(signal.SIGCONT)
        check_slots_are_free(connector)
        assert (window == 1).all()
    check_both_ways(connector, window, peer, tiny_runs())

    peer.revoke()
    before = window.copy(), peer.bytes.copy()
    for direction, blamed in ((Direction.PULL, "source"), (Direction.PUSH, "destination")):
        ticket = connector.submit("peer", direction, tiny_runs())
        error = finish(connector, ticket)[ticket]
        assert error is not None and blamed in error and "no registered region" in error
    np.testing.assert_array_equal(window, before[0])
    np.testing.assert_array_equal(peer.bytes, before[1])
    check_slots_are_free(connector)

    assert peer.process.communicate(timeout=DEADLINE_S) == ("", "")
    ticket = connector.submit("peer", Direction.PULL, tiny_runs())
    assert finish(connector, ticket)[ticket]
    assert peer.process.returncode == 0
