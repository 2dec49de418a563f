"""Plans between shards and block sizes of any kind, against moving every element by itself."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import bytes_of, bytes_of_runs, check_form, chunked

from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import PlanError, RegionError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.plan import CacheSide, plan_groups, plan_transfer
from kvxfer.transfer.reach import check_plan
from kvxfer.transfer.regions import Region, RegionSet

BUDGET = settings(max_examples=150, deadline=None, derandomize=True)
FEW = settings(max_examples=60, deadline=None, derandomize=True)
layouts = st.sampled_from(list(KVCacheLayout))


@dataclasses.dataclass(frozen=True)
class Case:
    sides: tuple[CacheSide, CacheSide]
    tokens: range
    layers: range

    def moves(self):
        """(source bytes, destination bytes), element by element."""
        ours, theirs = (
            set(side.held_heads if side.heads is None else side.heads) for side in self.sides
        )
        heads = sorted(ours & theirs)
        found = []
        for side in self.sides:
            table = {side.first_entry + i: block for i, block in enumerate(side.blocks)}
            own = [head - side.first_head for head in heads]
            found.append(bytes_of(side.geometry, table, self.tokens, own, self.layers).ravel())
        return found


@st.composite
def cases(draw):
    small = draw(st.integers(1, 4))
    ratio = draw(st.integers(1, 4))
    sizes = draw(st.permutations([small, small * ratio]))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, 22)] * 2)))
    num_layers = draw(st.integers(1, 3))
    layers = sorted(draw(st.tuples(*[st.integers(0, num_layers)] * 2)))
    dims = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    dtype = draw(st.sampled_from(["float8_e5m2", "bfloat16", "float32"]))
    sides = []
    for size in sizes:
        spec = KVCacheSpec(num_layers, draw(st.integers(1, 4)), *dims, dtype, size)
        first_entry = draw(st.integers(0, start // size))
        more = draw(st.integers(0, 2))
        entries = -(-max(stop, start + 1) // size) - first_entry + more
        capacity = entries + draw(st.integers(0, 3))
        geometry = GroupGeometry.build(
            spec, draw(layouts), capacity, draw(st.sampled_from([1, 8, 32]))
        )
        blocks = draw(st.one_of(st.permutations(range(capacity)), st.just(range(capacity))))
        rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
        regions = chunked(geometry, rng, draw(st.sampled_from([0, 0.1, 0.5])))
        first_head = draw(st.integers(0, 3))
        held = range(first_head, first_head + spec.num_kv_heads)
        bounds = sorted(draw(st.tuples(*[st.integers(held.start, held.stop)] * 2)))
        heads = draw(st.sampled_from([None, None, range(*bounds)]))
        sides.append(
            CacheSide(geometry, regions, list(blocks[:entries]), first_entry, first_head, heads)
        )
    return Case(tuple(sides), range(start, stop), range(*layers))


@BUDGET
@given(case=cases())
def test_what_both_sides_have_moves_and_nothing_else(case):
    src, dst = case.sides
    plan = plan_transfer(src, dst, case.tokens, case.layers)
    expected_from, expected_to = case.moves()
    came_from, went_to = bytes_of_runs(plan.runs)
    order = np.argsort(expected_to)
    assert np.array_equal(went_to, expected_to[order])
    assert np.array_equal(came_from, expected_from[order])
    assert len(plan.boxes) <= 5
    check_form(plan, src.regions, dst.regions)
    check_plan(plan, Direction.PUSH, src.regions, dst.regions)
    check_plan(plan, Direction.PULL, dst.regions, src.regions)


@FEW
@given(case=cases(), which=st.integers(0, 1), lost=st.floats(0, 1))
def test_a_side_must_cover_the_bytes_that_move_and_no_others(case, which, lost):
    sides, moved = list(case.sides), case.moves()[which]
    regions = sides[which].regions
    touched = np.unique(np.searchsorted(regions.starts, moved, side="right") - 1).tolist()
    needed = [regions.regions[i] for i in touched]
    sides[which] = dataclasses.replace(sides[which], regions=RegionSet(tuple(needed)))
    plan = plan_transfer(*sides, case.tokens, case.layers)
    assert plan.total_bytes == len(moved)
    if needed:
        needed.pop(int(lost * (len(needed) - 1)))
        sides[which] = dataclasses.replace(sides[which], regions=RegionSet(tuple(needed)))
        with pytest.raises(RegionError, match=("source", "destination")[which]):
            plan_transfer(*sides, case.tokens, case.layers)


# --- heads ----------------------------------------------------------------------------------------

SPEC = KVCacheSpec(2, 2, 4, 4, "bfloat16", 4)


def side(first_head=0, heads=None, spec=SPEC, blocks=(1, 2)):
    geometry = GroupGeometry.build(spec, KVCacheLayout.LBHNC, 8, 1)
    regions = RegionSet((Region(0, geometry.total_bytes),))
    return CacheSide(geometry, regions, blocks, 0, first_head, heads)


def test_shards_without_a_head_in_common_have_nothing_to_move():
    for src, dst in ((0, 2), (2, 0), (0, 7)):
        assert plan_transfer(side(src), side(dst), range(8)).boxes == ()
    assert plan_transfer(side(0, range(1)), side(0, range(1, 2)), range(8)).boxes == ()
    assert plan_transfer(side(1), side(2), range(8)).total_bytes == SPEC.block_bytes


@pytest.mark.parametrize("heads", [range(3, 5), range(1, 3), range(2, 5), range(2, 4, 2)])
def test_heads_outside_the_shard_are_refused(heads):
    for src, dst, name in ((side(2, heads), side(2), "source"), (side(2), side(2, heads), "dest")):
        with pytest.raises(PlanError, match=f"^heads: {name}|^heads: .*{name}|^heads: .*step"):
            plan_transfer(src, dst, range(4))


def test_a_negative_first_head_is_refused():
    with pytest.raises(PlanError, match=r"^first_head: -1 of the destination"):
        plan_transfer(side(), side(-1), range(4))


# --- block sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 6, 10])
def test_block_sizes_of_which_neither_divides_the_other_are_named(size):
    other = dataclasses.replace(SPEC, block_size=size)
    with pytest.raises(PlanError, match=f"^block_size differs: source 4, destination {size},"):
        plan_transfer(side(), side(spec=other), range(4))
    with pytest.raises(PlanError, match=f"^block_size differs: source {size}, destination 4,"):
        plan_transfer(side(spec=other), side(), range(0))


SMALL, LARGE = SPEC, dataclasses.replace(SPEC, block_size=8)


def test_a_destination_block_is_written_once_whichever_side_has_the_larger():
    assert plan_transfer(side(), side(spec=LARGE), range(8)).total_bytes == 2 * SMALL.block_bytes
    with pytest.raises(PlanError, match="destination block 1 would"):
        plan_transfer(side(blocks=[1, 2, 3, 4]), side(spec=LARGE, blocks=[1, 1]), range(16))
    with pytest.raises(PlanError, match="destination block 5 would"):
        plan_transfer(side(spec=LARGE), side(blocks=[5, 5]), range(8))


def test_each_side_has_entries_of_its_own():
    """8 tokens are two entries of one table and one of the other."""
    with pytest.raises(PlanError, match=r"tokens: .* source block table, which ends at 8"):
        plan_transfer(side(), side(spec=LARGE), range(9))
    with pytest.raises(PlanError, match=r"tokens: .* destination block table, which ends at 8"):
        plan_transfer(side(spec=LARGE), side(), range(9))


def test_consecutive_small_blocks_are_one_run_in_a_large_one():
    """Where a block is one stretch with tokens outside heads, and the small ones are neighbours."""
    geometries = [
        GroupGeometry.build(dataclasses.replace(spec, num_layers=1), KVCacheLayout.BLNHC, 8, 1)
        for spec in (SMALL, LARGE)
    ]
    sides = [
        CacheSide(one, RegionSet((Region(0, one.total_bytes),)), blocks)
        for one, blocks in zip(geometries, ([3, 4, 5, 6], [2, 3]), strict=True)
    ]
    assert plan_transfer(*sides, range(16)).num_runs == 1
    assert plan_transfer(*reversed(sides), range(16)).num_runs == 1


# --- groups ---------------------------------------------------------------------------------------


@FEW
@given(data=st.data())
def test_groups_may_differ_in_layers_and_are_never_joined(data):
    """Block 0 lies at the very start of a group, and may follow the last block of the one before;
    with one granule a byte there is no padding in between."""
    specs = [SPEC, dataclasses.replace(SPEC, num_layers=1)]
    caches = [
        CacheGeometry.build(specs, [data.draw(layouts) for _ in specs], [3, 3], 1) for _ in "ab"
    ]
    regions = []
    for cache in caches:
        bounds = [Region(group.offset, group.total_bytes) for group in cache.groups]
        regions.append(RegionSet(tuple(bounds)))
    sides = [
        [CacheSide(group, regions[i], data.draw(st.permutations(range(3)))) for group in one.groups]
        for i, one in enumerate(caches)
    ]
    layers = [data.draw(st.sampled_from([None, range(1)])), None]
    plan = plan_groups(*sides, [range(12)] * 2, layers)
    parts = [plan_transfer(*one) for one in zip(*sides, [range(12)] * 2, layers, strict=True)]
    assert plan.total_bytes == sum(part.total_bytes for part in parts)
    assert plan.num_runs == sum(part.num_runs for part in parts)
    check_form(plan, *regions)
    check_plan(plan, Direction.PUSH, *regions)
