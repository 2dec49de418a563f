"""Which blocks are well inside the regions, against looking at every slab."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import RegionError
from kvxfer.transfer import whole_blocks
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

SPEC = KVCacheSpec(
    num_layers=2, num_kv_heads=2, head_dim_k=2, head_dim_v=2, dtype="float32", block_size=2
)
CAPACITY = 12


def geometry_of(layout, group=0):
    """Group 0, or one that lies behind another."""
    first = GroupGeometry.build(SPEC, layout, CAPACITY, 64)
    if not group:
        return first
    return GroupGeometry.build(SPEC, layout, CAPACITY, 64, offset=first.end)


def slabs(geometry, block):
    size = geometry.segment_block_bytes
    for segment in range(geometry.num_segments):
        start = geometry.segment_offset(segment) + block * size
        yield start, start + size


def is_whole(geometry, regions, block):
    return all(
        any(one.offset < start and end < one.end for one in regions.regions)
        for start, end in slabs(geometry, block)
    )


@st.composite
def region_sets(draw, end):
    cuts = sorted(draw(st.sets(st.integers(0, end // 32), min_size=2, max_size=9)))
    kept = draw(st.lists(st.integers(0, 7), min_size=0, max_size=2))
    pairs = list(itertools.pairwise(cuts))
    found = [Region(32 * a, 32 * (b - a)) for i, (a, b) in enumerate(pairs) if i not in kept]
    return RegionSet(tuple(found))


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("group", [0, 1])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_are_of_the_blocks_inside_regions_and_of_no_other(layout, group, data):
    geometry = geometry_of(layout, group)
    regions = data.draw(region_sets(geometry.end + 64))
    rows = regions.whole_blocks(geometry)
    inside = [block for block in range(CAPACITY) if is_whole(geometry, regions, block)]
    assert [block for block in range(CAPACITY) if rows.has(block, block)] == inside
    lowest, highest = sorted(data.draw(st.tuples(*[st.integers(0, CAPACITY - 1)] * 2)))
    row = range(lowest, highest + 1)
    assert rows.has(lowest, highest) == all(block in inside for block in row)


def test_one_region_has_all_blocks_but_those_at_its_ends():
    geometry = geometry_of(KVCacheLayout.BLHNC)
    regions = RegionSet((Region(0, geometry.end),))
    assert [b for b in range(CAPACITY) if not regions.whole_blocks(geometry).has(b, b)] == [0, 11]
    assert regions.whole_blocks(geometry) is regions.whole_blocks(geometry)


def test_more_stretches_than_any_cache_has_are_planned_for_the_long_way(monkeypatch):
    monkeypatch.setattr(whole_blocks, "MAX_STRETCHES", 1)
    geometry = geometry_of(KVCacheLayout.LBHNC)
    regions = RegionSet((Region(0, geometry.end),))
    assert not regions.whole_blocks(geometry).has(5, 5)
    side = CacheSide(geometry, regions, [5])
    assert plan_transfer(side, side, range(2)).num_runs == 2


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_block_without_memory_is_refused_wherever_it_lies(layout):
    geometry = geometry_of(layout)
    hole = next(iter(slabs(geometry, 6)))[0]
    regions = RegionSet((Region(0, hole), Region(hole + 4, geometry.end - hole - 4)))
    for block in range(CAPACITY):
        side = CacheSide(geometry, regions, [block])
        if block == 6:
            with pytest.raises(RegionError, match=r"no registered region"):
                plan_transfer(side, side, range(2))
        else:
            assert plan_transfer(side, side, range(2)).total_bytes == SPEC.block_bytes
