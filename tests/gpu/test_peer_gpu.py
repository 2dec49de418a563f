"""`peer` over growable GPU memory: two processes on one GPU, and on two that see only their own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.peer_processes import MIB, TIMEOUT_S, MakePeer, PeerProcess, peers_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

FIRST, SECOND, LATER = (0, 4 * MIB), (64 * MIB, 2 * MIB), (128 * MIB, 64 * MIB)
SIZE = 256 * MIB
UNSHARE = ("unshare", "-pni", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def make_peer(tmp_path: Path) -> Iterator[MakePeer]:
    directory = tmp_path / "peers"
    directory.mkdir(0o700)
    with peers_in(directory) as make:
        yield make


def on_gpu(make_peer: MakePeer, seed: int, gpu: int = 0, **options: object) -> PeerProcess:
    """A process that sees this GPU alone, with its first two chunks."""
    alone = {"CUDA_VISIBLE_DEVICES": str(gpu)}
    made: PeerProcess = make_peer(SIZE, seed, device="cuda:0", environment=alone, **options)
    made.ask("grow", FIRST, SECOND)
    return made


def whole(*chunks: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(offset, offset, size) for offset, size in chunks]


def scattered(chunk: tuple[int, int], run_bytes: int) -> list[tuple[int, int, int]]:
    """Every other run of a chunk, to its own place."""
    offset, size = chunk
    starts = range(offset, offset + size, 2 * run_bytes)
    return [(start, start, run_bytes) for start in starts]


def check_life(owner: PeerProcess, importer: PeerProcess) -> None:
    """Pull, grow, pull, shrink, and grow again at the same place."""
    importer.meet(owner, owner.ask("describe"))
    assert importer.ask("pull", "owner", whole(FIRST, SECOND)) is None
    assert importer.holds(owner, FIRST) and importer.holds(owner, SECOND)
    importer.ask("grow", LATER)
    importer.meet(owner, owner.ask("grow", LATER))
    for run_bytes in (4096, 65536):
        assert importer.ask("pull", "owner", scattered(LATER, run_bytes)) is None
    assert not importer.holds(owner, LATER)
    assert importer.ask("pull", "owner", whole(LATER)) is None
    assert importer.holds(owner, LATER)
    before = owner.ask("facts")["free_bytes"]
    rest = owner.ask("describe_below", LATER[0])
    importer.ask("renew", "owner", owner.base, rest)
    owner.ask("shrink", LATER[0])
    assert owner.ask("facts")["free_bytes"] >= before + LATER[1], "the importer let go of it"
    owner.ask("grow", LATER)
    importer.meet(owner, owner.ask("describe"))
    assert importer.ask("pull", "owner", whole(LATER, FIRST)) is None
    assert importer.holds(owner, LATER) and importer.holds(owner, FIRST)


def test_two_processes_on_one_gpu(make_peer: MakePeer) -> None:
    check_life(on_gpu(make_peer, 1), on_gpu(make_peer, 2))


def test_two_gpus_each_seen_by_its_own_process_only(make_peer: MakePeer) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_life(on_gpu(make_peer, 1, 0), on_gpu(make_peer, 2, 1))


def test_two_gpus_between_namespaces_of_their_own(make_peer: MakePeer) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], timeout=20).returncode:
        pytest.skip("unshare is not permitted here")
    sides = [on_gpu(make_peer, seed, seed - 1, wrapper=UNSHARE) for seed in (1, 2)]
    spaces = [side.ask("facts")["namespaces"][:3] for side in sides]
    assert not set(spaces[0]).intersection(spaces[1])
    check_life(*sides)


def test_an_importer_cannot_write_or_the_driver_has_said_so(
    tmp_path: Path, make_peer: MakePeer
) -> None:
    owner, importer = on_gpu(make_peer, 1), on_gpu(make_peer, 2)
    importer.meet(owner, owner.ask("describe"))
    assert importer.ask("pull", "owner", whole(FIRST)) is None
    told = [one for one in importer.ask("facts")["refused"] if "reading only" in one]
    if told:
        pytest.skip(f"this driver maps no memory for reading only: {told[0]}")
    with pytest.raises(EOFError):  # its context does not survive that
        importer.ask("scribble", owner.name)
    importer.forgive()
    reader = on_gpu(make_peer, 3)
    reader.meet(owner, owner.ask("describe"))
    assert reader.ask("pull", "owner", whole(FIRST)) is None
    assert reader.holds(owner, FIRST)


def test_an_owner_killed_while_copying_ends_no_one_else(make_peer: MakePeer) -> None:
    owner, other, importer = (on_gpu(make_peer, seed) for seed in (1, 2, 3))
    importer.ask("grow", LATER)
    owner.ask("grow", LATER)
    importer.meet(owner, owner.ask("describe"))
    assert importer.ask("pull", "owner", whole(FIRST)) is None
    for _ in range(20):
        importer.ask("start", "owner", scattered(LATER, 4096))
    owner.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while not importer.ask("is_lost", owner.name):
        assert time.monotonic() < deadline
    importer.meet(other, other.ask("describe"))
    assert importer.ask("pull", "owner", whole(FIRST)) is None
    assert importer.holds(other, FIRST)
