"""What a peer that never let go of memory can do to its owner, over NIXL by TCP and
cross-memory attach: nothing.

The owner is another process, since without tombstones it would not survive.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fork_server import ForkServer
from support.peer_processes import peers_in
from support.stale_steps import check_stale_peer, making

from connectors.nixl import NixlConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

DEADLINE_S = 30.0
WAYS = {"nixl": ("push", "pull"), "peer": ("pull",)}
OWNER_SCRIPT = Path(__file__).with_name("nixl_owner.py")


class Owner:
    """The other process."""

    def __init__(self, server: ForkServer) -> None:
        name = f"owner-{os.getpid()}-{time.monotonic_ns()}"
        self.process = server.pipe(OWNER_SCRIPT, name)

    def ask(self, command: str) -> dict[str, Any]:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> int:
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.wait(0.0)


@pytest.fixture(params=["tcp", "cma,tcp"])
def owner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> Iterator[Owner]:
    """Over TCP it is the owner's process that touches the memory; by cross-memory attach the peer
    does it alone."""
    monkeypatch.setenv("UCX_TLS", request.param)
    made = Owner(fork_server)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def stale(owner: Owner) -> Iterator[tuple[NixlConnector, TransferPlan]]:
    """A peer that has connected, and its plan: ones into all that the owner is about to release."""
    told = owner.ask("describe")
    window = np.full(told["size"], 0xAB, dtype=np.uint8)
    memory = MemoryWindow(int(window.ctypes.data), told["size"], "cpu")
    peer = NixlConnector(f"stale-{os.getpid()}-{time.monotonic_ns()}", memory)
    regions = [Region(*region) for region in told["regions"]]
    peer.register(regions)
    peer.connect("owner", told["base"], bytes.fromhex(told["description"]))
    upper = [region for region in regions if region.offset]
    offsets = np.array([region.offset for region in upper], dtype=np.int64)
    sizes = np.array([region.size for region in upper], dtype=np.int64)
    yield peer, TransferPlan.of_runs(offsets, offsets, sizes)
    peer.close()


def move(peer: NixlConnector, direction: Direction, plan: TransferPlan) -> str | None:
    ticket = peer.submit("owner", direction, plan)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for result in peer.poll():
            assert result.ticket == ticket
            return result.error
        time.sleep(0.0005)
    raise TimeoutError("the transfer did not end")


def test_a_stale_peer_reads_and_writes_tombstones_and_the_owner_lives(
    owner: Owner, stale: tuple[NixlConnector, TransferPlan]
) -> None:
    peer, plan = stale
    assert move(peer, Direction.PUSH, plan) is None
    assert owner.ask("look")["rest_sum"] != 0
    answer = owner.ask("retire")
    assert answer["blocks"] == 4
    assert answer["tombstones"] == plan.total_bytes
    for direction in (Direction.PUSH, Direction.PULL):
        assert move(peer, direction, plan) is None, "NIXL enforces no deregistration"
    answer = owner.ask("look")
    assert (answer["blocks"], answer["kept"]) == (4, True)
    answer = owner.ask("extend")
    assert (answer["blocks"], answer["tombstones"], answer["kept"]) == (64, 0, True)
    assert answer["rest_sum"] == 0, "what the stale peer wrote was thrown away"
    assert owner.end() == 0


@pytest.mark.parametrize("owner", ["tcp"], indirect=True)
def test_without_tombstones_the_owner_would_die(
    owner: Owner, stale: tuple[NixlConnector, TransferPlan]
) -> None:
    """Why there are tombstones. Should this fail one day, the transport has learnt manners."""
    peer, plan = stale
    assert move(peer, Direction.PUSH, plan) is None
    assert owner.ask("decommit")["tombstones"] == 0
    assert move(peer, Direction.PUSH, plan) is not None
    assert owner.end() == -11


@pytest.mark.slow
@pytest.mark.parametrize("connector", WAYS)
def test_the_steps_that_gpus_are_put_through(connector: str, tmp_path: Path) -> None:
    directory = tmp_path / "peers"
    directory.mkdir(0o700)
    with peers_in(directory) as make_peer:
        make = partial(making, make_peer, connector=connector)
        check_stale_peer(make, WAYS[connector], has_tombstones=True)
