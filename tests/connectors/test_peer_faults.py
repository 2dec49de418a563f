"""An owner of `peer` that answers wrongly loses its importer's tickets, and nobody else's."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.peer_processes import KIB, MIB, descriptors_and_mappings
from support.peer_side import PeerSide, pull_from

from connectors import handover_socket
from connectors.handover_socket import Chunks, Listener, Open, Refused, Want, send
from connectors.peer_import import Reach
from kvxfer.errors import ConnectorError, DriverError
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.reach import Description

pytestmark = pytest.mark.usefixtures("conserved")

FIRST, SECOND = (0, 512 * KIB), (2 * MIB, 256 * KIB)
SIZE = 8 * MIB
HOST = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
BASE = 1 << 40


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


def reach_of(name: str, *chunks: tuple[int, int, int], **changes: object) -> Reach:
    told = {"host": HOST, "place": "host", "size_bytes": SIZE, "granularity": 64 * KIB}
    return msgspec.convert(
        {**told, "socket_name": name, "chunks": [list(one) for one in chunks], **changes}, Reach
    )


def described(reach: Reach, regions: Sequence[tuple[int, int]] | None = None) -> bytes:
    if regions is None:
        regions = [(offset, size) for _, offset, size in reach.chunks]
    return Description(
        agent="fake", device="cpu", regions=list(regions), transport=msgspec.msgpack.encode(reach)
    ).to_bytes()


class FakeOwner:
    """A socket and two good chunks, from which a test answers as it likes."""

    def __init__(self, directory: Path) -> None:
        self.listener = Listener(directory)
        self.buffer = VirtualBuffer(HostDriver(), SIZE)
        self.buffer.commit([FIRST])
        self.buffer.commit([SECOND])
        self.sock: socket.socket | None = None

    @property
    def description(self) -> bytes:
        return described(reach_of(self.listener.name, (0, *FIRST), (1, *SECOND)))

    def fds(self, count: int = 2) -> list[int]:
        return [self.buffer.export(chunk, writable=False) for chunk in self.buffer.chunks[:count]]

    def await_request(self, side: PeerSide) -> socket.socket:
        """The connection over which the importer has asked for its chunks."""
        side.connector.poll()
        self.sock = self.listener.accept()
        assert self.sock is not None
        opening = handover_socket.receive_by_owner(self.sock)
        assert isinstance(opening, Open) and opening.token == b"token"
        assert handover_socket.receive_by_owner(self.sock) == Want([0, 1])
        return self.sock

    def send(self, frame: Chunks | Refused, fds: Sequence[int]) -> None:
        assert self.sock is not None
        assert send(self.sock, frame, fds)
        handover_socket.close_all(fds)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        self.listener.close()
        self.buffer.close()


@pytest.fixture
def fake(peer_directory: Path) -> Iterator[FakeOwner]:
    made = FakeOwner(peer_directory)
    yield made
    made.close()


GOOD = Chunks([(0, *FIRST), (1, *SECOND)])


def fewer_descriptors(fake: FakeOwner) -> None:
    fake.send(GOOD, fake.fds(1))


def no_descriptors(fake: FakeOwner) -> None:
    fake.send(GOOD, [])


def too_many_descriptors(fake: FakeOwner) -> None:
    fake.send(GOOD, [*fake.fds(), *fake.fds(1)])


def far_too_many_descriptors(fake: FakeOwner) -> None:
    fake.send(GOOD, [fd for _ in range(40) for fd in fake.fds()])


def descriptors_of_the_wrong_size(fake: FakeOwner) -> None:
    fake.send(GOOD, list(reversed(fake.fds())))


def what_is_no_memory(fake: FakeOwner) -> None:
    fake.send(GOOD, [os.open("/dev/null", os.O_RDONLY), *fake.fds(1)])


def a_chunk_elsewhere(fake: FakeOwner) -> None:
    fake.send(Chunks([(0, 4 * MIB, FIRST[1]), (1, *SECOND)]), fake.fds())


def a_chunk_of_another_size(fake: FakeOwner) -> None:
    fake.send(Chunks([(0, 0, 64 * KIB), (1, *SECOND)]), fake.fds())


def a_chunk_outside_the_reservation(fake: FakeOwner) -> None:
    fake.send(Chunks([(0, SIZE, FIRST[1]), (1, *SECOND)]), fake.fds())


def a_chunk_twice(fake: FakeOwner) -> None:
    fake.send(Chunks([(0, *FIRST), (0, *FIRST)]), fake.fds())


def a_chunk_that_was_not_asked_for(fake: FakeOwner) -> None:
    fake.send(Chunks([(0, *FIRST), (5, *SECOND)]), fake.fds())


def a_refusal(fake: FakeOwner) -> None:
    fake.send(Refused("not today"), [])


def a_refusal_with_a_descriptor(fake: FakeOwner) -> None:
    fake.send(Refused("not today"), fake.fds(1))


def garbage(fake: FakeOwner) -> None:
    assert fake.sock is not None
    fake.sock.send(b"\xc1garbage")


def a_frame_of_another_kind(fake: FakeOwner) -> None:
    assert fake.sock is not None
    fake.sock.send(msgspec.msgpack.encode(Want([1])))


def an_oversized_frame(fake: FakeOwner) -> None:
    assert fake.sock is not None
    fake.sock.send(bytes(handover_socket.MAX_FRAME_BYTES + 1))


def silence(fake: FakeOwner) -> None:
    assert fake.sock is not None
    fake.sock.close()


WRONGS: list[tuple[Callable[[FakeOwner], None], str]] = [
    (fewer_descriptors, "2 descriptors were announced, 1 came"),
    (no_descriptors, "2 descriptors were announced, 0 came"),
    (too_many_descriptors, "2 descriptors were announced, 3 came"),
    (far_too_many_descriptors, "more than there is room for"),
    (descriptors_of_the_wrong_size, "bytes were announced|were announced"),
    (what_is_no_memory, "import"),
    (a_chunk_elsewhere, "in place of"),
    (a_chunk_of_another_size, "in place of"),
    (a_chunk_outside_the_reservation, "in place of"),
    (a_chunk_twice, "not asked for"),
    (a_chunk_that_was_not_asked_for, "not asked for"),
    (a_refusal, "refused: not today"),
    (a_refusal_with_a_descriptor, "0 descriptors were announced, 1 came"),
    (garbage, "no frame of ours"),
    (a_frame_of_another_kind, "no frame of ours"),
    (an_oversized_frame, "a frame of more than"),
    (silence, "hung up"),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONGS, ids=[one.__name__ for one, _ in WRONGS])
def test_an_owner_that_misbehaves_loses_its_importers_tickets_and_no_more(
    side: PeerSide,
    owner: PeerSide,
    fake: FakeOwner,
    wrong: Callable[[FakeOwner], None],
    reason: str,
) -> None:
    before = descriptors_and_mappings()
    side.connector.connect("fake", BASE, fake.description, b"token")
    ticket = side.start("fake", (0, 0, 1), (SECOND[0], SECOND[0], 1))
    fake.await_request(side)
    wrong(fake)
    error = side.finish(ticket).error
    assert error is not None
    assert any(part in error for part in reason.split("|")), error
    with pytest.raises(ConnectorError, match="fake"):
        side.start("fake", (0, 0, 1))
    if fake.sock is not None:
        fake.sock.close()
        fake.sock = None
    assert descriptors_and_mappings() == before
    pull_from(owner, side)


def test_what_comes_late_for_revoked_chunks_is_not_mapped(side: PeerSide, fake: FakeOwner) -> None:
    side.connector.connect("fake", BASE, fake.description, b"token")
    fake.await_request(side)
    before = descriptors_and_mappings()
    fewer = described(reach_of(fake.listener.name, (1, *SECOND)))
    side.connector.renew("fake", BASE, fewer)
    fake.send(GOOD, fake.fds())
    assert side.finish(side.start("fake", (SECOND[0], 0, 1))).error is None
    assert descriptors_and_mappings() == (before[0] + 1, before[1] + 1)


UNREACHABLE: list[tuple[str, dict[str, object]]] = [
    ("another host", {"host": "elsewhere"}),
    ("not of our kind", {"place": "GPU-1"}),
    ("do not fit ours", {"granularity": 4096}),
    ("lie on granules", {"granularity": 1 * MIB}),
    ("within its", {"size_bytes": 64 * KIB}),
    ("no name of a socket", {"socket_name": "../other.peer"}),
    ("no name of a socket", {"socket_name": "/etc/passwd"}),
    ("KVXFER_PEER_DIR", {"socket_name": "0123.peer"}),
    ("reserve", {"size_bytes": 1 << 50}),
    ("are not its regions", {"chunks": [(0, 64 * KIB, 64 * KIB)]}),
    ("description", {"chunks": [(0, 0, -1)]}),
    ("description", {"size_bytes": 0}),
]


@pytest.mark.parametrize(("reason", "changes"), UNREACHABLE)
def test_a_description_of_what_cannot_be_mapped_is_refused(
    side: PeerSide, fake: FakeOwner, reason: str, changes: dict[str, object]
) -> None:
    before = descriptors_and_mappings()
    plain = msgspec.to_builtins(reach_of(fake.listener.name, (0, *FIRST)))
    transport = msgspec.msgpack.encode({**plain, **changes})
    told = Description(agent="fake", device="cpu", regions=[FIRST], transport=transport)
    with pytest.raises(ConnectorError, match=reason):
        side.connector.connect("fake", BASE, told.to_bytes(), b"token")
    with pytest.raises(ConnectorError, match="not connected"):
        side.start("fake", (0, 0, 1))
    assert descriptors_and_mappings() == before


def test_what_the_driver_will_not_unmap_is_told_and_stays(
    peer_directory: Path, owner: PeerSide, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    side = PeerSide("importer", SIZE)
    side.grow(FIRST)
    pull_from(owner, side)
    agent = side.connector._peer_agent()
    (link,) = agent._links.values()

    def refuse(address: int, size_bytes: int, handle: int) -> None:
        raise DriverError("decommit", 1, "refused")

    with monkeypatch.context() as broken:
        broken.setattr(side.buffer.driver, "decommit", refuse)
        with caplog.at_level(logging.ERROR):
            side.connector.disconnect("owner")
        (record,) = caplog.records
        assert "memory stays mapped: unmapping of" in record.getMessage()
        side.connector.poll()
        assert len(caplog.records) == 1
        with pytest.raises(ConnectorError, match="memory of 1 peers stays mapped"):
            side.connector.close()
    side.connector.close()
    link.release()
    side.buffer.close()
