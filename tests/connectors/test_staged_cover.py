"""What is remembered of shapes against the exact check, and handles that are posted again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.staged_sides import (
    KIB,
    MIB,
    NUM_SLOTS,
    RING_BYTES,
    Side,
    check_slots_are_free,
    collect,
    fill,
    plan_of,
    talking,
)

from connectors import staged_agent
from connectors.staged_cover import Cover
from connectors.staged_ring import STAGING_BYTES
from connectors.staging_plan import Nest
from kvxfer.transfer.boxes import spread
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region, RegionSet

AXES = [((), ()), ((3,), (100,)), ((2, 3), (400, 7)), ((2,), (-30,))]


@st.composite
def region_sets(draw: st.DrawFn) -> RegionSet:
    edges = sorted(draw(st.sets(st.integers(0, 1000), max_size=12)))
    pairs = list(pairwise(edges))
    kept = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    chosen = [Region(a, b - a) for (a, b), keep in zip(pairs, kept, strict=True) if keep]
    return RegionSet(tuple(chosen))


@settings(max_examples=60, deadline=None)
@given(
    regions=region_sets(),
    nests=st.lists(
        st.tuples(
            st.lists(st.integers(60, 1000), min_size=1, max_size=3),
            st.sampled_from(AXES),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_what_is_held_is_registered(regions: RegionSet, nests: list) -> None:
    registered = np.zeros(3000, dtype=bool)
    for region in regions.regions:
        registered[region.offset : region.end] = True
    cover = Cover(regions)
    for starts, (extents, strides), run_bytes in nests:
        nest = Nest(np.array(starts, dtype=np.int64), extents, strides, run_bytes)
        runs = spread(nest.starts, extents, strides)
        whole = all(registered[run : run + run_bytes].all() for run in runs.tolist())
        held = cover.holds(nest)
        assert whole or not held
        if len(starts) == 1:
            assert held == whole


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Side]]:
    monkeypatch.setenv(STAGING_BYTES, str(RING_BYTES))
    made = [Side.make(name) for name in ("left", "right")]
    fill(*(side.bytes for side in made))
    yield made
    for side in made:
        side.connector.close()


@pytest.mark.parametrize("direction", Direction)
def test_slots_are_written_by_handles_made_once(
    sides: list[Side], direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = sides
    talking(left, right)
    source = (left, right)[direction is Direction.PULL]
    agent = source.connector._engine.site.agent
    made: list[int] = []
    really = agent._make

    def make(source: int, remote: RemotePeer, target: int, size_bytes: int) -> object:
        made.append(size_bytes)
        return really(source, remote, target, size_bytes)

    monkeypatch.setattr(agent, "_make", make)
    for size in (MIB, MIB, MIB // 2 + 100, MIB):  # the last piece of the third is a short one
        fill(left.bytes, right.bytes)
        ticket = left.connector.submit("right", direction, plan_of((0, 2 * MIB, size)))
        assert collect(left, {ticket}, right) == {ticket: None}
        target = (right, left)[direction is Direction.PULL]
        np.testing.assert_array_equal(target.bytes[2 * MIB :][:size], source.bytes[:size])
    assert len(made) <= NUM_SLOTS**2 + 2
    assert {size for size in made if size != 64 * KIB} <= {100 + MIB // 2 % (64 * KIB)}


def test_few_handles_are_kept(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = sides
    monkeypatch.setattr(staged_agent, "MAX_IDLE", 3)
    talking(left, right)
    ticket = left.connector.submit("right", Direction.PUSH, plan_of((0, 0, 2 * MIB)))
    assert collect(left, {ticket}, right) == {ticket: None}
    np.testing.assert_array_equal(left.bytes[: 2 * MIB], right.bytes[: 2 * MIB])
    agent = left.connector._engine.site.agent
    assert len(agent._idle) == 3
    check_slots_are_free(left.connector)
    left.connector.close()
    assert not agent._idle
