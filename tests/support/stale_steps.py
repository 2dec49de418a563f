"""What a lost peer's kept descriptors can do to memory that its owner gave back meanwhile, the
same steps for every connector and every kind of memory: nothing, and once it is known to be dead
the memory is free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.peer_processes import MIB, MakePeer, PeerProcess, Refusal

FIRST, SECOND, LATER = (0, 4 * MIB), (64 * MIB, 2 * MIB), (128 * MIB, 64 * MIB)
ALL = (FIRST, SECOND, LATER)
SIZE = 256 * MIB
TOTAL = sum(size for _, size in ALL)
SLACK = 32 * MIB
"""Of free memory, of which transports take a little now and then."""
SETTLE_TIMEOUT_S = 10.0

Make = Callable[[int], PeerProcess]
"""A process of this seed."""


def making(make_peer: MakePeer, seed: int, **options: Any) -> PeerProcess:
    made: PeerProcess = make_peer(SIZE, seed, **options)
    made.ask("grow", *ALL)
    return made


def check_stale_peer(make: Make, ways: tuple[str, ...], has_tombstones: bool) -> list[str]:
    """`ways` are what the connector can do, `has_tombstones` what the memory can; how each late
    access ended."""
    owner, stale = make(1), make(2)
    stale.meet(owner, owner.ask("describe"))
    assert stale.ask("pull", "owner", whole(*ALL)) is None
    assert all(stale.holds(owner, one) for one in ALL)
    stale.ask("fill")  # else it would write what is there anyway
    kept = "tombstones" if has_tombstones else "pinned"
    awake = owner.ask("memory")
    # it is lost now, and nothing was heard of it: nobody knows whether it still comes

    owner.ask("retire", LATER[0])
    shrunk = owner.ask("memory")
    assert (shrunk["committed"], shrunk[kept]) == (TOTAL - LATER[1], LATER[1])
    ends = [access(stale, way, LATER) for way in ways]
    assert owner.holds(owner, FIRST) and owner.holds(owner, SECOND), "what it has kept is its own"
    if not has_tombstones:
        assert shrunk["free"] < awake["free"] + SLACK, "the memory is still there"
        with pytest.raises(Refusal, match="MemoryPinned"):
            owner.ask("grow", LATER)

    owner.ask("retire", 0)
    asleep = owner.ask("memory")
    assert (asleep["committed"], asleep[kept]) == (0, TOTAL)
    ends += [access(stale, way, one) for way in ways for one in ALL]
    if not has_tombstones:
        assert asleep["free"] < awake["free"] + SLACK

    stale.kill()
    before = 0 if has_tombstones else settled_free(owner)
    owner.ask("bury")
    assert owner.ask("memory")[kept] == 0
    if not has_tombstones:
        assert settled_free(owner) >= before + TOTAL - SLACK, "the memory has gone back"
    owner.ask("grow", *ALL)
    assert all(owner.holds(owner, one) for one in ALL), "nothing that was written late is left"
    other = make(3)
    other.meet(owner, owner.ask("describe"))
    assert other.ask("pull", "owner", whole(*ALL)) is None
    assert all(other.holds(owner, one) for one in ALL), "it serves on"
    return ends


def access(stale: PeerProcess, way: str, place: tuple[int, int]) -> str:
    """Whether it lands is the transport's affair; that both live is ours."""
    try:
        error = stale.ask("move", "owner", whole(place), way)
    except Refusal as refusal:
        error = str(refusal)
    return f"{way}: {error or 'landed'}"


def settled_free(owner: PeerProcess) -> int:
    """Free bytes, once a driver has taken a killed process apart, which it may do late."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    free = -1
    while (now := int(owner.ask("memory")["free"])) != free:
        assert time.monotonic() < deadline, "free memory never comes to rest"
        free = now
        time.sleep(0.3)
    return free


def whole(*chunks: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(offset, offset, size) for offset, size in chunks]
