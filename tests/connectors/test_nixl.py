"""NIXL with a peer in another process, and how it is set up. The rest: the connector contract."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support.fork_server import ForkServer, PipedCommand

import kvxfer.transfer.agent_connector
from connectors.nixl import NixlConnector
from connectors.nixl_api import segment_of
from connectors.nixl_environment import PROGRESS_THREAD, wants_progress_thread
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

MIB = 1 << 20
REGION = Region(MIB, 32 * MIB)
WINDOW_BYTES = REGION.end + MIB
DEADLINE_S = 30.0
PEER_SCRIPT = Path(__file__).with_name("nixl_peer.py")
_names = count()


@dataclass
class Peer:
    """The other process and its window, which this process sees through a shared file."""

    process: subprocess.Popen[str] | PipedCommand
    bytes: np.ndarray
    base: int
    description: bytes
    environment: dict[str, str]

    def stop(self) -> tuple[int, str]:
        """End it in order: its exit status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


StartPeer = Callable[..., Peer]


@pytest.fixture
def start_peer(tmp_path: Path, fork_server: ForkServer) -> Iterator[StartPeer]:
    """Forked, and so without a wait for imports; with `anew` started, to load NIXL by itself."""
    processes: list[subprocess.Popen[str] | PipedCommand] = []

    def start(anew: bool = False, **environment: str) -> Peer:
        path = tmp_path / f"window-{len(processes)}"
        path.touch()
        os.truncate(path, WINDOW_BYTES)
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
        name = f"peer-{os.getpid()}-{next(_names)}"
        arguments = (str(path), name, str(REGION.offset), str(REGION.size))
        process: subprocess.Popen[str] | PipedCommand
        if anew:
            process = subprocess.Popen(
                [sys.executable, PEER_SCRIPT, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
        else:
            process = fork_server.pipe(PEER_SCRIPT, *arguments)
        processes.append(process)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        description = bytes.fromhex(ready["description"])
        memory = np.frombuffer(shared, dtype=np.uint8)
        return Peer(process, memory, ready["base"], description, ready["environment"])

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def window() -> np.ndarray:
    return np.zeros(WINDOW_BYTES, dtype=np.uint8)


@pytest.fixture
def connector(window: np.ndarray) -> Iterator[NixlConnector]:
    memory = MemoryWindow(int(window.ctypes.data), WINDOW_BYTES, "cpu")
    made = NixlConnector(f"here-{os.getpid()}-{next(_names)}", memory)
    made.register([REGION])
    yield made
    made.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes, whose transfers are then asynchronous. Must stand before `connector`."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def long_plan() -> TransferPlan:
    """The region onto itself, in pages: more than socket buffers swallow."""
    offsets = np.arange(REGION.offset, REGION.end, MIB // 4, dtype=np.int64)
    return TransferPlan.of_runs(offsets, offsets, np.full(len(offsets), MIB // 4, dtype=np.int64))


def finish(connector: NixlConnector, ticket: int) -> str | None:
    """Poll until the ticket ends and return its error."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ended = connector.poll()
        if ended:
            assert [result.ticket for result in ended] == [ticket]
            return ended[0].error
        time.sleep(0.0005)
    raise TimeoutError(f"ticket {ticket} did not end in {DEADLINE_S} s")


def swap_some_runs(connector: NixlConnector, window: np.ndarray, peer: Peer) -> None:
    """Push into the peer and pull from it, and check every byte of both windows."""
    rng = np.random.default_rng(3)
    window[:] = rng.integers(0, 256, WINDOW_BYTES, dtype=np.uint8)
    peer.bytes[:] = rng.integers(0, 256, WINDOW_BYTES, dtype=np.uint8)
    ours, theirs = window.copy(), peer.bytes.copy()
    here, there, size = REGION.offset + 3, REGION.offset + 2 * MIB, MIB + 1
    columns = [np.array([value], dtype=np.int64) for value in (here, there, size)]
    push = connector.submit("peer", Direction.PUSH, TransferPlan.of_runs(*columns))
    assert finish(connector, push) is None
    theirs[there : there + size] = ours[here : here + size]
    assert np.array_equal(peer.bytes, theirs)
    pull = connector.submit("peer", Direction.PULL, TransferPlan.of_runs(*columns))
    assert finish(connector, pull) is None
    ours[there : there + size] = theirs[here : here + size]
    assert np.array_equal(window, ours)
    assert np.array_equal(peer.bytes, theirs)


def test_another_process_that_is_killed_and_started_again(
    start_peer: StartPeer,
    connector: NixlConnector,
    window: np.ndarray,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("connectors.nixl.lists_pay", lambda *_: True)
    peer = start_peer(anew=True)
    connector.connect("peer", peer.base, peer.description)
    swap_some_runs(connector, window, peer)
    warm_up = connector.submit("peer", Direction.PULL, long_plan())
    assert finish(connector, warm_up) is None  # a prepared list is there when the peer dies
    peer.process.kill()
    peer.process.wait(DEADLINE_S)
    poll_in_vain(connector)
    with pytest.raises(ConnectorError, match="NIXL"):
        ticket = connector.submit("peer", Direction.PULL, long_plan())
        raise ConnectorError(finish(connector, ticket) or "it succeeded")
    connector.disconnect("peer")
    reborn = start_peer(anew=True, UCX_TCP_KEEPIDLE="7s")
    connector.connect("peer", reborn.base, reborn.description)
    swap_some_runs(connector, window, reborn)
    connector.close()
    assert reborn.stop() == (0, "")
    assert reborn.environment["UCX_TCP_KEEPIDLE"] == "7s"  # the user's wish stands
    assert reborn.environment["UCX_RMA_PPLN_ENABLE"] == "y"
    assert capfd.readouterr().err == ""


def test_a_peer_killed_under_transfers(
    over_tcp: None, start_peer: StartPeer, connector: NixlConnector
) -> None:
    peer = start_peer()
    connector.connect("peer", peer.base, peer.description)
    tickets = {connector.submit("peer", direction, long_plan()) for direction in Direction}
    assert connector.poll() == []
    peer.process.kill()
    ended: list[TicketResult] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < 2 and time.monotonic() < deadline:
        ended += connector.poll()
    assert {result.ticket for result in ended} == tickets
    assert all(result.error and "NIXL" in result.error for result in ended)


def test_a_stopped_peers_ticket_ends_only_when_its_bytes_are_at_rest(
    over_tcp: None,
    start_peer: StartPeer,
    connector: NixlConnector,
    window: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = start_peer()
    peer.bytes[:] = 7
    connector.connect("peer", peer.base, peer.description)
    peer.process.send_signal(signal.SIGSTOP)
    ticket = connector.submit("peer", Direction.PULL, long_plan())
    connector.disconnect("peer")
    poll_in_vain(connector)
    peer.process.send_signal(signal.SIGCONT)
    error = finish(connector, ticket)
    assert error is not None and "disconnected" in error
    window[:] = 1
    poll_in_vain(connector)
    assert (window == 1).all()

    connector.connect("peer", peer.base, peer.description)
    swap_some_runs(connector, window, peer)

    monkeypatch.setattr(kvxfer.transfer.agent_connector, "_CLOSE_TIMEOUT_S", 0.2)
    peer.process.send_signal(signal.SIGSTOP)
    connector.submit("peer", Direction.PUSH, long_plan())
    with pytest.raises(ConnectorError, match="must stay mapped"):
        connector.close()
    connector.close()


def poll_in_vain(connector: NixlConnector) -> None:
    """Poll for 0.3 s, in which nothing may end."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert connector.poll() == []


@pytest.mark.parametrize(("choice", "expected"), [("0", False), ("1", True)])
def test_the_environment_decides_on_the_progress_thread(
    monkeypatch: pytest.MonkeyPatch, choice: str, expected: bool
) -> None:
    monkeypatch.setenv(PROGRESS_THREAD, choice)
    assert wants_progress_thread() is expected


def test_the_progress_thread_goes_by_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS_THREAD, raising=False)
    assert wants_progress_thread() is (len(os.sched_getaffinity(0)) >= 8)
    monkeypatch.setenv(PROGRESS_THREAD, "yes")
    with pytest.raises(UsageError, match=PROGRESS_THREAD):
        wants_progress_thread()


def test_device_names() -> None:
    assert segment_of("cpu") == ("DRAM", 0)
    assert segment_of("cuda") == ("VRAM", 0)
    assert segment_of("cuda:3") == ("VRAM", 3)
    for bad in ("", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "meta", "cuda:99999"):
        with pytest.raises(ConnectorError):
            segment_of(bad)
