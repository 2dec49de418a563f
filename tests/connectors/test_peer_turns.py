"""What `peer` maps of an owner's growth, turn by turn: copies do not wait for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.peer_side import PeerSide, pull_from

MIB = 1 << 20
SIZE = 32 * MIB
FIRST = (0, MIB)
GROWTH = [(offset * MIB, MIB) for offset in range(1, 25)]


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PeerSide, PeerSide]]:
    """An owner whose growth was described to the importer, which pulled its first chunk before."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("KVXFER_PEER_DIR", str(tmp_path))
    with ExitStack() as stack:
        owner, importer = (stack.enter_context(PeerSide(name, SIZE)) for name in ("a", "b"))
        owner.grow(FIRST)
        importer.grow((0, SIZE))
        owner.bytes(*FIRST)[:] = 7
        pull_from(owner, importer)
        described = owner.connector.describe(owner.grow(*GROWTH))
        importer.connector.connect("owner", owner.base, described)
        yield owner, importer


def link_of(side: PeerSide):
    (link,) = side.connector._epoch.agent._links.values()
    return link


def receive(owner: PeerSide, side: PeerSide) -> None:
    """Until something has arrived, of which no more than one chunk is mapped."""
    link = link_of(side)
    for _ in range(1000):
        owner.connector.poll()
        link.advance(0.0)
        if len(link._mapped) > 1:
            return
    raise TimeoutError("nothing arrived")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_turn_without_time_maps_one_chunk(sides):
    owner, importer = sides
    receive(owner, importer)
    link = link_of(importer)
    for count in range(3, 8):
        link.advance(0.0)
        assert len(link._mapped) == count
    link.advance(5.0)
    assert len(link._mapped) == 1 + len(GROWTH)
    assert not link._arrived


def test_a_transfer_waits_for_its_own_chunks_alone(sides):
    owner, importer = sides
    receive(owner, importer)
    ticket = importer.start("owner", (0, 0, MIB), (MIB, MIB, MIB))
    assert importer.finish(ticket, owner.connector.poll).error is None
    assert (importer.bytes(*FIRST) == 7).all()


def test_what_arrived_and_was_never_mapped_leaves_no_descriptor(sides):
    owner, importer = sides
    before = descriptors()
    receive(owner, importer)
    assert descriptors() > before
    importer.connector.disconnect("owner")
    owner.connector.poll()
    assert descriptors() <= before


def test_a_renewal_lets_go_of_what_arrived_and_was_revoked(sides):
    owner, importer = sides
    receive(owner, importer)
    link = link_of(importer)
    assert link._arrived
    kept = owner.connector._regions.regions[:2]
    importer.connector.renew("owner", owner.base, owner.connector.describe(kept))
    assert not link._arrived
    assert {region for region, _ in link._mapped.values()} <= set(kept)
    ticket = importer.start("owner", (MIB, 0, MIB))
    assert importer.finish(ticket, owner.connector.poll).error is None
