"""Wrong frames at the sockets over which `peer` hands memory over, at both ends, and wrong
notifications of the staged way: nobody crashes, nothing grows, and the next transfer is right."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.attack_figures import GROWTH_BYTES, NAME, Coverage
from support.fault_record import FaultRecord
from support.peer_processes import KIB, MIB, descriptors_and_mappings
from support.peer_side import PeerSide, pull_from
from support.staged_sides import (
    RING_BYTES,
    SOME,
    Side,
    check_slots_are_free,
    collect,
    fill,
    talking,
)
from support.wrong_frames import StagedAttack, Watched, WrongFrames, types_of

from connectors import peer_export, peer_import
from connectors.handover_socket import Chunks, Listener, Open, Refused, ToImporter, ToOwner, Want
from connectors.peer_import import Reach
from connectors.staged_messages import Message
from connectors.staged_ring import STAGING_BYTES
from kvxfer.bench.report import Figure
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.reach import Description

FEW, MANY = 300, 30_000
SIZE, BASE = 8 * MIB, 1 << 40
FIRST, SECOND = (0, 512 * KIB), (2 * MIB, 256 * KIB)
COUNTS = pytest.mark.parametrize(
    "num", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)


@pytest.fixture
def peer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "peers"
    path.mkdir(0o700)
    monkeypatch.setenv("KVXFER_PEER_DIR", str(path))
    return path


@pytest.fixture
def pair(peer_directory: Path) -> Iterator[tuple[PeerSide, PeerSide]]:
    """An owner of two chunks full of sevens, and an importer."""
    before = descriptors_and_mappings()
    with PeerSide("owner-agent", SIZE) as owner, PeerSide("importer", SIZE) as side:
        for one in (owner, side):
            one.grow(FIRST, SECOND)
        for offset, size in (FIRST, SECOND):
            owner.bytes(offset, size)[:] = 7
        yield owner, side
    assert descriptors_and_mappings() == before


def run(
    what: str,
    num: int,
    record: FaultRecord,
    send: Callable[[], object],
    reached: Callable[[], list[Coverage]],
) -> None:
    """`send` one after the other, and see what grew after the first quarter."""
    began = time.monotonic()
    held: tuple[int, tuple[int, int]] = (0, (0, 0))
    for done in range(num):
        if done == num // 4:
            held = _resident_bytes(), descriptors_and_mappings()
        send()
    took_s = time.monotonic() - began
    grown = _resident_bytes() - held[0]
    files = descriptors_and_mappings()[0] - held[1][0]
    record.add(
        NAME,
        Figure(f"{NAME}: {what} sent", num, "", MANY, "higher", 1, 0.0),
        Figure(f"{NAME}: {what} a second", num / took_s, "/s", None, "higher", 1, 0.0),
        Figure(f"{NAME}: {what}, RSS grown", grown, "bytes", GROWTH_BYTES, "lower", 1, 0.0),
        Figure(f"{NAME}: {what}, descriptors grown", files, "files", 4, "lower", 1, 0.0),
        *(one.figure() for one in reached()),
    )
    for one in reached():
        print(one)
        assert one.missing == []
    assert grown < GROWTH_BYTES
    assert files <= 4  # a connection or two that are not closed yet


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def coverage(whom: str, union: object, watched: Watched) -> list[Coverage]:
    types = frozenset(types_of(union))
    return [
        Coverage(f"decoders of {whom}", frozenset(watched.decoded), types),
        Coverage(f"handlers of {whom}", watched.reached, types),
    ]


@COUNTS
def test_wrong_frames_to_an_owner(
    num: int,
    pair: tuple[PeerSide, PeerSide],
    peer_directory: Path,
    fault_record: FaultRecord,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From who has an invitation, and from who has none; some send descriptors too."""
    caplog.set_level(logging.CRITICAL)
    owner, side = pair
    exporter, watched = owner.connector._peer_agent().exporter, Watched()
    receive = watched.decoder(peer_export.receive_by_owner, lambda frame: [frame])
    monkeypatch.setattr(peer_export, "receive_by_owner", receive)
    monkeypatch.setattr(exporter, "_take", watched.handler(exporter._take, 1))
    wrong = WrongFrames(num, ToOwner, [Open(b"x" * 32, "a"), Want([0, 1, 77])])
    path = str(peer_directory / exporter.socket_name)

    def send() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.settimeout(5.0)
            raw.connect(path)
            if wrong.random.random() < 0.5:
                raw.send(msgspec.msgpack.encode(Open(owner.connector.invite(), "a")))
            data = wrong.next() or b"\0"
            if wrong.random.random() < 0.1:
                socket.send_fds(raw, [data], [raw.fileno()])
            else:
                raw.send(data)
            owner.connector.poll()

    run("frames to owners", num, fault_record, send, lambda: coverage("owners", ToOwner, watched))
    owner.connector.poll()
    pull_from(owner, side)


@COUNTS
def test_wrong_frames_to_an_importer(
    num: int,
    pair: tuple[PeerSide, PeerSide],
    peer_directory: Path,
    fault_record: FaultRecord,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From an owner that it was told of, each over a new connection."""
    caplog.set_level(logging.CRITICAL)
    owner, side = pair
    watched = Watched()
    receive = watched.decoder(peer_import.receive_by_importer, lambda found: [found[0]])
    monkeypatch.setattr(peer_import, "receive_by_importer", receive)
    wrong = WrongFrames(num, ToImporter, [Chunks([(0, *FIRST), (1, *SECOND)]), Refused("no")])
    listener = Listener(peer_directory)
    told = description_of(listener.name)

    def send() -> None:
        side.connector.connect("fake", BASE, told, b"token")
        ticket = side.start("fake", (0, 0, 1))
        side.connector.poll()
        raw = listener.accept()
        assert raw is not None
        with raw:
            fds = [exported(owner, index) for index in range(wrong.random.choice((0, 0, 1, 2, 2)))]
            try:
                socket.send_fds(raw, [wrong.next() or b"\0"], fds)
            finally:
                for fd in fds:
                    os.close(fd)
        side.finish(ticket)
        side.connector.disconnect("fake")

    def reached() -> list[Coverage]:
        return coverage("importers", ToImporter, watched)[:1]  # it handles what it decodes at once

    try:
        run("frames to importers", num, fault_record, send, reached)
    finally:
        listener.close()
    pull_from(owner, side)


def exported(owner: PeerSide, index: int) -> int:
    return owner.buffer.export(owner.buffer.chunks[index], writable=False)


def description_of(name: str) -> bytes:
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    reckoned = {"host": host, "place": "host", "size_bytes": SIZE, "granularity": 64 * KIB}
    chunks = [[0, *FIRST], [1, *SECOND]]
    reach = msgspec.convert({**reckoned, "socket_name": name, "chunks": chunks}, Reach)
    transport = msgspec.msgpack.encode(reach)
    regions = [FIRST, SECOND]
    told = Description(agent="fake", device="cpu", regions=regions, transport=transport)
    return told.to_bytes()


@COUNTS
def test_wrong_notifications_of_the_staged_way(
    num: int,
    fault_record: FaultRecord,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From a peer that was met, about what goes on and about nothing; a third one is served right
    afterwards."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv(STAGING_BYTES, str(RING_BYTES))
    left, right, third = sides = [Side.make(name) for name in ("left", "right", "third")]
    try:
        fill(*(one.bytes for one in sides))
        talking(left, right)
        right.meet(left)
        right.meet(third)
        attack = StagedAttack(left, right, num)
        attack.watch(monkeypatch)

        def reached() -> list[Coverage]:
            return coverage("staged ends", Message, attack.watched)

        run("notifications of the staged way", num, fault_record, attack.send, reached)
        attack.settle()
        check_slots_are_free(right.connector)
        ticket = right.connector.submit("third", Direction.PULL, SOME)
        assert collect(right, {ticket}, third) == {ticket: None}
    finally:
        for one in sides:
            one.connector.close()
