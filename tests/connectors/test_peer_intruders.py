"""Who talks to an owner of `peer` without a right to, or wrongly, gets nothing."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.peer_processes import KIB, MIB, descriptors_and_mappings
from support.peer_side import TIMEOUT_S, PeerSide, pull_from

from connectors import handover_socket, peer_export
from connectors.handover_socket import Chunks, Open, Refused, Want
from connectors.peer import PeerConnector
from kvxfer.errors import ConnectorError
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region

pytestmark = pytest.mark.usefixtures("conserved")

FIRST, SECOND = (0, 512 * KIB), (2 * MIB, 256 * KIB)
SIZE = 8 * MIB
BASE = 1 << 40
GOOD = Chunks([(0, *FIRST), (1, *SECOND)])


@pytest.fixture
def side(peer_directory: Path) -> Iterator[PeerSide]:
    with PeerSide("importer", SIZE) as made:
        made.grow(FIRST, SECOND)
        yield made


@pytest.fixture
def owner(peer_directory: Path) -> Iterator[PeerSide]:
    with PeerSide("owner-agent", SIZE) as made:
        for offset, size in (FIRST, SECOND):
            made.grow((offset, size))
            made.bytes(offset, size)[:] = 7
        yield made


def dial(owner: PeerSide, peer_directory: Path) -> socket.socket:
    """A raw connection to a real owner."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(TIMEOUT_S)
    made.connect(str(peer_directory / owner.connector._peer_agent().exporter.socket_name))
    return made


def refusal(owner: PeerSide, raw: socket.socket) -> str:
    """What the owner says before it hangs up."""
    raw.settimeout(0.002)
    deadline = time.monotonic() + TIMEOUT_S
    said = b""
    while time.monotonic() < deadline:
        owner.connector.poll()
        try:
            data = raw.recv(1 << 16)
        except TimeoutError:
            continue
        if not data:
            break
        said = data
    raw.close()
    return msgspec.msgpack.decode(said, type=Refused).reason


def encoded(*frames: Open | Want) -> list[bytes]:
    return [msgspec.msgpack.encode(frame) for frame in frames]


INTRUSIONS: dict[str, tuple[list[bytes], str]] = {
    "wrong token": (encoded(Open(b"x" * 32, "a")), "not valid"),
    "no token": (encoded(Open(b"", "a")), "not valid"),
    "chunks without a token": (encoded(Want([0])), "Want out of turn"),
    "garbage": ([b"GET / HTTP/1.1\r\n"], "no frame of ours"),
    "no agent": ([msgspec.msgpack.encode({"type": "Open", "token": b"", "agent": ""})], "no frame"),
    "another's frame": ([msgspec.msgpack.encode(GOOD)], "no frame of ours"),
    "oversized": ([bytes(handover_socket.MAX_FRAME_BYTES + 1)], "a frame of more than"),
    "nothing": ([], "showed no invitation"),
}


@pytest.mark.parametrize("intrusion", INTRUSIONS)
def test_whoever_shows_no_invitation_gets_nothing(
    owner: PeerSide,
    side: PeerSide,
    peer_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    intrusion: str,
) -> None:
    monkeypatch.setattr(peer_export, "OPEN_TIMEOUT_S", 0.05)
    frames, reason = INTRUSIONS[intrusion]
    raw = dial(owner, peer_directory)
    for frame in frames:
        raw.send(frame)
    assert reason in refusal(owner, raw)
    pull_from(owner, side)


def test_descriptors_sent_to_an_owner_are_not_taken(
    owner: PeerSide, side: PeerSide, peer_directory: Path
) -> None:
    raw = dial(owner, peer_directory)
    before = descriptors_and_mappings()
    token = msgspec.msgpack.encode(Open(owner.connector.invite(), "a"))
    socket.send_fds(raw, [token], [raw.fileno()] * 3)
    assert "none are taken" in refusal(owner, raw)
    assert descriptors_and_mappings()[0] == before[0] - 1
    pull_from(owner, side)


def test_an_importer_that_asks_out_of_bounds_is_dropped(
    owner: PeerSide, peer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_export, "MAX_WANTED", 100)
    raw = dial(owner, peer_directory)
    for frame in encoded(Open(owner.connector.invite(), "a"), Want(list(range(101)))):
        raw.send(frame)
    assert "more than 100 chunks" in refusal(owner, raw)
    raw = dial(owner, peer_directory)
    for frame in encoded(Open(owner.connector.invite(), "a"), Open(b"", "a")):
        raw.send(frame)
    assert "Open out of turn" in refusal(owner, raw)
    raw = dial(owner, peer_directory)
    for frame in encoded(Open(owner.connector.invite(), "a"), Want([77, 78])):
        raw.send(frame)
    owner.connector.poll()
    raw.setblocking(False)
    with pytest.raises(BlockingIOError):
        raw.recv(100)  # what is not there (any more) is passed over
    raw.close()
    owner.connector.poll()


def test_an_invitation_serves_once_and_expires(
    owner: PeerSide, side: PeerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = owner.connector.describe(owner.connector._regions.regions)

    def outcome(token: bytes) -> str | None:
        side.connector.connect("owner", owner.base, told, token)
        error = side.finish(side.start("owner", (0, 0, 1)), owner.connector.poll).error
        side.connector.disconnect("owner")
        return error

    first, second = owner.connector.invite(), owner.connector.invite()
    assert first != second and len(first) == 32
    assert outcome(first) is None
    assert "not valid" in (outcome(first) or "")
    assert outcome(second) is None
    monkeypatch.setattr(peer_export, "INVITATION_LIFETIME_S", 0.05)
    late = owner.connector.invite()
    time.sleep(0.06)
    assert "not valid" in (outcome(late) or "")


def test_invitations_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_export, "MAX_INVITATIONS", 3)
    invitations = peer_export.Invitations()
    tokens = [invitations.issue() for _ in range(4)]
    assert [invitations.redeem(token) for token in tokens] == [False, True, True, True]
    assert not any(invitations.redeem(token) for token in tokens)


def test_complaints_are_logged_at_a_bounded_rate(
    owner: PeerSide, peer_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            raw = dial(owner, peer_directory)
            raw.send(b"garbage")
            refusal(owner, raw)
    (record,) = caplog.records
    assert "dropped importer unknown: a peer sent no frame of ours" in record.getMessage()


def test_importers_are_bounded(
    owner: PeerSide, side: PeerSide, peer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_export, "MAX_IMPORTERS", 4)
    monkeypatch.setattr(peer_export, "OPEN_TIMEOUT_S", 0.1)
    owner.connector.poll()  # who looked whether it is alive
    idle = [dial(owner, peer_directory) for _ in range(10)]
    owner.connector.poll()
    assert len(owner.connector._peer_agent().exporter._importers) == 4
    pull_from(owner, side)  # once the idle ones have been dropped
    for raw in idle:
        raw.close()
    owner.connector.poll()


def test_only_whole_chunks_of_exportable_memory_can_be_registered(peer_directory: Path) -> None:
    with PeerSide("owner", SIZE) as side:
        side.buffer.commit([FIRST])
        for offset, size in ((0, 64 * KIB), (64 * KIB, 64 * KIB), SECOND):
            with pytest.raises(ConnectorError, match="no chunk"):
                side.connector.register([Region(offset, size)])
        side.connector.register([Region(*FIRST)])
    with pytest.raises(ConnectorError, match="not made of chunks"):
        PeerConnector("plain", MemoryWindow(BASE, SIZE, "cpu"))
    with VirtualBuffer(FixedDriver("cpu"), SIZE) as fixed:
        fixed.commit([FIRST])
        connector = PeerConnector("fixed", MemoryWindow(fixed.base_address, SIZE, "cpu", fixed))
        with pytest.raises(ConnectorError, match="fixed memory has no handles"):
            connector.register([Region(*FIRST)])
        connector.close()
    assert not list(peer_directory.iterdir())


def test_a_worker_that_is_disconnected_is_not_served_any_more(
    owner: PeerSide, side: PeerSide
) -> None:
    pull_from(owner, side)
    told = side.connector.describe(side.connector._regions.regions), side.connector.invite()
    owner.connector.connect("side", side.base, *told)
    owner.connector.disconnect("side")
    side.connector.poll()
    with pytest.raises(ConnectorError, match="hung up"):
        side.start("owner", (0, 0, 1))
    pull_from(owner, side)
