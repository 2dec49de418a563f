"""What `peer` does between processes: pull, grow, revoke, isolation, sudden ends.

Over 300 lines, since all of it shares one owner process.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import run_in_child
from support.peer_process import pattern
from support.peer_processes import (
    KIB,
    MIB,
    MakePeer,
    PeerProcess,
    descriptors_and_mappings,
    peers_in,
)
from support.peer_side import PeerSide

from kvxfer.errors import ConnectorError

pytestmark = pytest.mark.usefixtures("conserved")

FIRST, SECOND, LATER = (0, 512 * KIB), (2 * MIB, 256 * KIB), (4 * MIB, 1 * MIB)
SIZE = 8 * MIB
TIMEOUT_S = 20.0


@pytest.fixture
def side(peer_directory: Path) -> Iterator[PeerSide]:
    """An importer in this process, with room for all that an owner has."""
    with PeerSide("importer", SIZE) as made:
        made.grow(FIRST, SECOND, LATER)
        yield made


@pytest.fixture(scope="module")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers")
    path.chmod(0o700)
    return path


@pytest.fixture
def peer_directory(shared_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVXFER_PEER_DIR", str(shared_directory))
    return shared_directory


@pytest.fixture(scope="module")
def owner_process(shared_directory: Path) -> Iterator[PeerProcess]:
    with peers_in(shared_directory) as make:
        yield make(SIZE, 7)


@pytest.fixture
def owner(owner_process: PeerProcess) -> PeerProcess:
    """With its first two chunks and no others."""
    owner_process.ask("shrink", 0)
    owner_process.ask("grow", FIRST, SECOND)
    return owner_process


def meet(side: PeerSide, owner: PeerProcess, description: str) -> None:
    told = bytes.fromhex(description), bytes.fromhex(owner.ask("invite"))
    side.connector.connect("owner", owner.base, *told)


def whole(*chunks: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(offset, offset, size) for offset, size in chunks]


def peer_pages() -> list[tuple[int, int, str]]:
    """(start, size, permissions) of the chunks of others that are mapped here: none can be
    written."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:kvxfer" in line and line.split()[1].startswith("r-"):
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            found.append((start, end - start, line.split()[1]))
    return found


def eventually(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_two_processes_pull_and_growth_in_the_middle_sends_only_what_is_new(
    make_peer: MakePeer,
) -> None:
    left, right = make_peer(SIZE, 1), make_peer(SIZE, 2)
    for one in (left, right):
        one.ask("grow", FIRST, SECOND, LATER)
    left.ask("shrink", LATER[0])
    left.meet(right, right.ask("describe"))
    right.meet(left, left.ask("describe"))
    # Each fetches the other's first chunk into its own second half of LATER or past it.
    assert right.ask("pull", "owner", [[0, LATER[0], FIRST[1]]]) is None
    assert right.holds(left, FIRST, at=LATER[0])
    before = right.ask("facts")["fds"]
    told = left.ask("grow", LATER)
    right.meet(left, told)
    assert right.ask("pull", "owner", whole(LATER)) is None
    assert right.holds(left, LATER)
    assert right.ask("facts")["fds"] == before + 1
    assert left.ask("pull", "owner", whole(SECOND)) is None
    assert left.holds(right, SECOND)
    assert not left.holds(right, FIRST)


def test_an_importer_sees_what_the_owner_writes_and_cannot_write(
    side: PeerSide, owner: PeerProcess
) -> None:
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST))).error is None
    assert (side.bytes(*FIRST) == pattern(7, *FIRST)).all()
    pages = peer_pages()
    assert sorted(size for _, size, _ in pages) == [SECOND[1], FIRST[1]]
    for start, size, permissions in pages:
        assert permissions == "r--s"
        for address in (start, start + size - 1):
            assert run_in_child(lambda at=address: ctypes.string_at(at, 1)) == 0
            assert run_in_child(lambda at=address: ctypes.memset(at, 1, 1)) == -signal.SIGSEGV


def test_renewal_unmaps_what_was_revoked_before_the_owner_releases_it(
    side: PeerSide, owner: PeerProcess
) -> None:
    told = owner.ask("grow", LATER)
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(LATER))).error is None
    mapped = peer_pages()
    assert len(mapped) == 3
    told = owner.ask("shrink", LATER[0])
    side.connector.renew("owner", owner.base, bytes.fromhex(told))
    assert peer_pages() == [page for page in mapped if page[1] != LATER[1]]
    with pytest.raises(ConnectorError, match="source"):
        side.start("owner", *whole(LATER))
    # The same addresses with a new chunk: over the same connection, without an invitation.
    owner.ask("grow", LATER)
    side.connector.connect("owner", owner.base, bytes.fromhex(owner.ask("describe")))
    side.bytes(*LATER)[:] = 0
    assert side.finish(side.start("owner", *whole(SECOND, LATER))).error is None
    assert (side.bytes(*LATER) == pattern(7, *LATER)).all()
    assert peer_pages() == mapped


def test_a_renewal_that_fails_leaves_nothing_mapped(side: PeerSide, owner: PeerProcess) -> None:
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST))).error is None
    assert peer_pages()
    with pytest.raises(ConnectorError):
        side.connector.renew("owner", owner.base, b"damaged")
    assert not peer_pages()
    with pytest.raises(ConnectorError, match="not connected"):
        side.start("owner", *whole(FIRST))


def test_a_chunk_that_came_again_without_a_renewal_is_refused(
    side: PeerSide, owner: PeerProcess
) -> None:
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST, SECOND))).error is None
    owner.ask("shrink", SECOND[0])
    again = owner.ask("grow", SECOND)
    with pytest.raises(ConnectorError, match="another chunk now"):
        side.connector.connect("owner", owner.base, bytes.fromhex(again))
    assert side.finish(side.start("owner", *whole(FIRST))).error is None


def test_a_transfer_waits_for_its_own_chunks_and_no_others(
    side: PeerSide, owner: PeerProcess
) -> None:
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST, SECOND))).error is None
    told = owner.ask("grow", LATER)
    side.connector.connect("owner", owner.base, bytes.fromhex(told))
    link = side.connector._peer_agent()._links[owner.name]
    assert link.awaited([], side.connector._peers["owner"].regions) == set()
    ticket = side.start("owner", *whole(FIRST))
    (flight,) = side.connector._flights.values()
    assert flight.handle.copy is not None, "it need not wait for what has just been described"
    assert side.finish(ticket).error is None
    ticket = side.start("owner", (LATER[0] + 5, LATER[0] + 5, 100))
    assert side.finish(ticket).error is None
    assert (side.bytes(LATER[0] + 5, 100) == pattern(7, *LATER)[5:105]).all()


def test_an_owner_that_never_answers_costs_one_ticket(
    side: PeerSide, peer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.peer_agent.MAP_TIMEOUT_S", 0.1)
    with PeerSide("idle", SIZE) as idle:
        told = idle.connector.describe(idle.grow(FIRST)), idle.connector.invite()
        side.connector.connect("owner", idle.base, *told)
        error = side.finish(side.start("owner", *whole(FIRST))).error
        assert error is not None and "did not hand over 1 chunks in 0.1 s" in error
        idle.bytes(*FIRST)[:] = 9
        ticket = side.start("owner", *whole(FIRST))
        assert side.finish(ticket, idle.connector.poll).error is None
        assert (side.bytes(*FIRST) == 9).all()


def test_an_owner_killed_while_copies_are_under_way_ends_them_and_nothing_else(
    make_peer: MakePeer, peer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.peer_copy.SLICE_BYTES", 256 * KIB)
    owner, other = make_peer(SIZE, 3), make_peer(SIZE, 4)
    owner.ask("grow", FIRST, SECOND, LATER)
    other.ask("grow", FIRST)
    with PeerSide("importer", SIZE) as side:
        side.grow(FIRST, SECOND, LATER)
        meet(side, owner, owner.ask("describe"))
        assert side.finish(side.start("owner", (0, 0, 1))).error is None
        tickets = {side.start("owner", *whole(FIRST, LATER)), side.start("owner", *whole(SECOND))}
        assert side.connector.poll() == []
        begun = side.bytes(*LATER)[: 256 * KIB], side.bytes(*FIRST)[: 256 * KIB]
        assert any(part.any() for part in begun)
        owner.kill()
        ended = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(ended) < 2 and time.monotonic() < deadline:
            ended += side.connector.poll()
        assert {result.ticket for result in ended} == tickets
        assert all("hung up" in (result.error or "") for result in ended)
        assert not side.bytes(*SECOND).any()
        assert not peer_pages()
        with pytest.raises(ConnectorError, match="hung up"):
            side.start("owner", (0, 0, 1))
        told = bytes.fromhex(other.ask("describe")), bytes.fromhex(other.ask("invite"))
        side.connector.connect("owner", other.base, *told)
        assert side.finish(side.start("owner", *whole(FIRST))).error is None
        assert (side.bytes(*FIRST) == pattern(4, *FIRST)).all()


def test_an_importer_killed_while_copying_leaves_its_owner_as_it_was(
    make_peer: MakePeer, owner: PeerProcess
) -> None:
    before = owner.ask("facts")["fds"]
    victim, survivor = make_peer(SIZE, 5), make_peer(SIZE, 6)
    for one in (victim, survivor):
        one.ask("grow", FIRST, SECOND)
        one.meet(owner, owner.ask("describe"))
    victim.ask("start", "owner", whole(FIRST, SECOND))
    assert survivor.ask("pull", "owner", whole(FIRST)) is None
    victim.kill()
    survivor.end()
    eventually(lambda: owner.ask("facts")["fds"] == before)
    assert owner.ask("digest", *FIRST)


def test_a_lost_connection_is_made_anew_with_a_new_invitation(
    side: PeerSide, owner: PeerProcess
) -> None:
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST))).error is None
    side.connector._peer_agent()._links[owner.name].lose("the test cut it")
    with pytest.raises(ConnectorError, match="the test cut it"):
        side.start("owner", *whole(FIRST))
    side.connector.poll()
    assert not peer_pages()
    first = owner.ask("grow", LATER)
    with pytest.raises(ConnectorError, match="no invitation"):
        side.connector.connect("owner", owner.base, bytes.fromhex(first))
    meet(side, owner, owner.ask("describe"))
    assert side.finish(side.start("owner", *whole(FIRST, LATER))).error is None


def test_everything_is_given_back_by_close(owner: PeerProcess, peer_directory: Path) -> None:
    told = owner.ask("describe")
    sockets = set(peer_directory.iterdir())
    before = descriptors_and_mappings()
    for _ in range(2):
        with PeerSide("importer", SIZE) as side:
            side.grow(FIRST)
            meet(side, owner, told)
            assert side.finish(side.start("owner", *whole(FIRST))).error is None
            assert len(set(peer_directory.iterdir())) == len(sockets) + 1
            side.connector.close()
            side.connector.close()
        assert descriptors_and_mappings() == before
        assert set(peer_directory.iterdir()) == sockets


UNSHARE = ("unshare", "-pnim", "--fork", "--mount-proc", "--kill-child")
MOVED = 'mount --bind "$0" "$1" && mount -t tmpfs none "$0" && shift && exec "$@"'
"""In a mount namespace: have the directory $0 at $1 and nowhere else."""


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode == 0


def test_it_works_between_namespaces_with_the_socket_directory_in_different_places(
    make_peer: MakePeer, peer_directory: Path, tmp_path: Path
) -> None:
    if not can_unshare():
        pytest.skip("unshare is not permitted here")
    moved = (*UNSHARE, "sh", "-c", MOVED, str(peer_directory), str(tmp_path))
    owner = make_peer(SIZE, 8, wrapper=UNSHARE)
    importer = make_peer(SIZE, 9, wrapper=moved, environment={"KVXFER_PEER_DIR": str(tmp_path)})
    spaces = [one.ask("facts") for one in (owner, importer)]
    assert [one["pid"] for one in spaces] == [1, 1]
    assert not set(spaces[0]["namespaces"]).intersection(spaces[1]["namespaces"])
    for one in (owner, importer):
        one.ask("grow", FIRST, SECOND)
    importer.meet(owner, owner.ask("describe"))
    assert importer.ask("pull", "owner", whole(FIRST, SECOND)) is None
    assert importer.holds(owner, FIRST) and importer.holds(owner, SECOND)
    importer.ask("grow", LATER)
    importer.meet(owner, owner.ask("grow", LATER))
    assert importer.ask("pull", "owner", whole(LATER)) is None
    assert importer.holds(owner, LATER)
