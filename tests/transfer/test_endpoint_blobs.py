"""Blobs between endpoints: damaged, mistaken, late, lost, twice, and in any order."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoints import TIMEOUT_S, fill, growable, kv_spec, meet, part, same

from kvxfer.errors import ConnectorError, KvxferError, MemoryPinned, TransferError, WireError
from kvxfer.transfer import endpoint_messages as blobs
from kvxfer.transfer.endpoint import Endpoint
from kvxfer.transfer.envelope import seal, unseal
from kvxfer.transfer.regions import Region


@pytest.fixture
def pair():
    with growable("a") as a, growable("b") as b:
        yield a, b
        for side, peer in ((a, "b"), (b, "a")):
            side.fence(peer)


def takers(endpoint: Endpoint, peer: str):
    return [
        lambda blob: endpoint.connect(peer, blob),
        lambda blob: endpoint.apply(peer, blob),
        lambda blob: endpoint.acknowledge(peer, blob),
    ]


def test_damaged_blobs_are_refused_whole(pair):
    a, b = pair
    meet(a, b)
    b.grow(200)
    update = b.update()
    good = [b.describe("a"), update, b.apply("a", a.update())]
    for take, blob in zip(takers(a, "b"), good, strict=True):
        for place in range(0, len(blob), max(1, len(blob) // 40)):
            bad = blob[:place] + bytes([blob[place] ^ 0x41]) + blob[place + 1 :]
            with pytest.raises(WireError):
                take(bad)
        for bad in (b"", blob[:-1], blob + b"x", blob[:20], seal(b""), seal(b"\xc1"), blob[30:]):
            with pytest.raises(WireError):
                take(bad)
    with pytest.raises(KvxferError, match="no registered region"):
        a.push("b", [1], [150])
    a.apply("b", update)
    a.push("b", [1], [150]).wait(TIMEOUT_S)


def test_blobs_of_another_kind_or_endpoint_are_refused(pair):
    a, b = pair
    with pytest.raises(TransferError, match="peer b is not connected"):
        a.apply("b", b.update())
    with pytest.raises(WireError, match="nothing was described to it"):
        a.acknowledge("b", blobs.encode(blobs.Acknowledgement(agent=a._memory._agent,
                                                              generation=0, epoch=0)))  # fmt: skip
    meet(a, b)
    told = [b.describe("a"), b.update(), b.apply("a", a.update())]
    for index, take in enumerate(takers(a, "b")):
        for other in range(3):
            if other != index:
                with pytest.raises(WireError, match="of kind"):
                    take(told[other])
    with growable("c") as c:
        with pytest.raises(WireError, match="the blob is of agent c"):
            a.apply("b", c.update())
        with pytest.raises(TransferError, match="not us"):
            c.acknowledge("b", told[2])
        with pytest.raises(ConnectorError):
            c.connect("c", c.describe("c"))
        c.fence("c")


def changed(blob: bytes, **fields: object) -> bytes:
    return seal(msgspec.msgpack.encode(msgspec.msgpack.decode(unseal(blob)) | fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regions": [Region(1 << 60, 4096)]}, "ends beyond"),
        ({"regions": [Region(0, 4096), Region(0, 4096)]}, "overlap"),
        ({"regions": [{"offset": -4096, "size": 4096}]}, "negative"),
        ({"base_address": 1 << 60}, "base_address"),
        ({"generation": -1}, "generation"),
        ({"lanes": ["x"] * 65}, "lanes"),
        ({"lanes": ["carrier pigeon"]}, "no lane"),
        ({"first_block": 2}, "first_block"),
        ({"shards": []}, "shards"),
        ({"shards": [{"first_head": 3, "total_heads": 4}]}, "first_head"),
        ({"geometry": {"groups": []}}, "groups"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_an_announcement_that_cannot_be_true_is_refused(pair, fields, text):
    a, b = pair
    with pytest.raises(WireError, match=text):
        a.connect("b", changed(b.describe("a"), **fields))
    with pytest.raises(TransferError, match="not connected"):
        a.push("b", [1], [1])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"since": 5, "generation": 6}, "generations 2 to 5 are missing"),
        ({"epoch": 1, "generation": 2}, "a revocation is missing"),
        ({"generation": 2, "regions": [Region(0, 4096)]}, "overlap"),
        ({"generation": 2, "regions": [Region(1 << 60, 4096)]}, "ends beyond"),
    ],
)
def test_a_change_that_does_not_follow_is_refused(pair, fields, text):
    a, b = pair
    meet(a, b)
    with pytest.raises(KvxferError, match=text):
        a.apply("b", changed(b.update(), **fields))
    b.grow(200)
    a.apply("b", b.update())
    a.push("b", [1], [150]).wait(TIMEOUT_S)


@pytest.mark.parametrize("fields", [{"generation": 9}, {"epoch": 1}])
def test_nobody_acknowledges_the_future(pair, fields):
    a, b = pair
    meet(a, b)
    with pytest.raises(WireError, match="we are at"):
        b.acknowledge("a", changed(a.apply("b", b.update()), **fields))


STEPS = st.lists(
    st.sampled_from(["grow", "update", "revoke", "release", "deliver", "lose", "again", "answer"]),
    min_size=5,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_in_whatever_order_a_peer_reaches_committed_memory_only(steps):
    """The owner's word may be lost, late or repeated; its memory goes after the acknowledgement."""
    with growable("a", initial=9) as a, growable("b", kv_spec(), "BLHNC", initial=9) as b:
        meet(a, b)
        told: deque[bytes] = deque()
        answers: deque[bytes] = deque()
        for step in steps:
            with suppress(KvxferError, IndexError):  # out of turn: what matters is what holds then
                take(step, a, b, told, answers)
            reached = set(a._remotes.require("b").regions.regions)
            there = set(b._memory.memory.regions)
            assert reached <= there, f"after {step}"
            b.check_conservation()
        finish(a, b)
        part(a, b)


def take(step: str, a: Endpoint, b: Endpoint, told: deque[bytes], answers: deque[bytes]) -> None:
    """One step of `b`, the owner, or of what lies between it and `a`."""
    if step == "grow":
        b.grow(b.num_blocks[0] + 16)
    elif step == "update":
        told.append(b.update())
    elif step == "revoke":
        told.append(b.revoke(9))
    elif step == "release":
        b.release()
    elif step == "deliver":
        answers.append(a.apply("b", told.popleft()))
    elif step == "lose":
        told.rotate(1)  # late
    elif step == "again":
        answers.append(a.apply("b", told[0]))
    else:
        b.acknowledge("a", answers.popleft())


def finish(a: Endpoint, b: Endpoint) -> None:
    """However that went, a revocation said again ends it; then both agree."""
    try:
        b.release()
    except MemoryPinned:
        b.acknowledge("a", a.apply("b", b.update()))
        b.release()
    except KvxferError:
        pass  # nothing was revoked
    b.acknowledge("a", a.apply("b", b.update()))
    assert set(a._remotes.require("b").regions.regions) == set(b._memory.memory.regions)
    fill(a, 1, 2)
    last = b.num_blocks[0] - 1
    a.push("b", [1], [last]).wait(TIMEOUT_S)
    assert same(b, last, a, 1)
