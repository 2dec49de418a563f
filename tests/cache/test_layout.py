"""Where bytes lie, against a cache laid out element by element."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import (
    AXES,
    MAX_ADDRESSES,
    MAX_GROUPS,
    CacheGeometry,
    GroupGeometry,
    KVCacheLayout,
)
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import PlanError, UsageError

NAMES = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
BUDGET = settings(max_examples=25, deadline=None, derandomize=True)

specs = st.builds(
    KVCacheSpec,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim_k=st.integers(1, 2),
    head_dim_v=st.integers(0, 2),
    dtype=st.sampled_from(["float8_e5m2", "bfloat16", "float32"]),
    block_size=st.integers(1, 4),
)
every_layout = pytest.mark.parametrize("name", NAMES)
any_geometry = given(
    spec=specs, capacity=st.integers(1, 4), granularity=st.sampled_from([1, 2, 8, 64, 256])
)


def extents(geometry):
    spec = geometry.spec
    return {
        "L": spec.num_layers,
        "B": geometry.capacity_blocks,
        "H": spec.num_kv_heads,
        "N": spec.block_size,
        "C": spec.head_dim_k + spec.head_dim_v,
    }


def laid_out(geometry):
    """{(l, b, h, n, c): (segment, offset)}, by writing a cache from its first byte to its last.

    Each segment starts at the first granule behind the one before.
    """
    name = geometry.layout.value
    sizes = extents(geometry)
    outer = name[: name.index("B")]
    places = {}
    offset = 0
    for segment, outside in enumerate(itertools.product(*(range(sizes[a]) for a in outer))):
        while offset % geometry.granularity:
            offset += 1
        for inside in itertools.product(*(range(sizes[a]) for a in name[len(outer) :])):
            index = dict(zip(name, (*outside, *inside), strict=True))
            places[tuple(index[a] for a in AXES)] = (segment, offset)
            offset += geometry.spec.itemsize
    return places


def byte_of(geometry, element):
    return sum(i * stride for i, stride in zip(element, geometry.strides, strict=True))


@every_layout
@BUDGET
@any_geometry
def test_elements_lie_in_the_order_that_the_name_says(name, spec, capacity, granularity):
    geometry = GroupGeometry.build(spec, KVCacheLayout(name), capacity, granularity)
    expected = laid_out(geometry)
    assert {e: byte_of(geometry, e) for e in expected} == {e: o for e, (_, o) in expected.items()}


@every_layout
@BUDGET
@any_geometry
def test_elements_are_apart_and_within_their_segment(name, spec, capacity, granularity):
    geometry = GroupGeometry.build(spec, KVCacheLayout(name), capacity, granularity)
    places = laid_out(geometry)
    assert geometry.num_segments == 1 + max(segment for segment, _ in places.values())
    taken = set()
    for element, (segment, _) in places.items():
        first = byte_of(geometry, element)
        mine = set(range(first, first + spec.itemsize))
        assert not mine & taken
        taken |= mine
        start = geometry.segment_offset(segment)
        assert start <= first
        assert max(mine) < start + geometry.segment_stride_bytes <= geometry.total_bytes
    assert len(taken) == capacity * spec.block_bytes


@every_layout
@BUDGET
@any_geometry
def test_segments_never_share_a_granule(name, spec, capacity, granularity):
    geometry = GroupGeometry.build(spec, KVCacheLayout(name), capacity, granularity)
    granules = {}
    for element, (segment, _) in laid_out(geometry).items():
        first = byte_of(geometry, element)
        for byte in (first, first + spec.itemsize - 1):
            assert granules.setdefault(byte // granularity, segment) == segment


@every_layout
@BUDGET
@any_geometry
def test_a_committed_prefix_backs_the_blocks_it_says(name, spec, capacity, granularity):
    geometry = GroupGeometry.build(spec, KVCacheLayout(name), capacity, granularity)
    needed = [0] * capacity  # bytes of each segment that must be committed to have the block whole
    for element, (segment, _) in laid_out(geometry).items():
        end = byte_of(geometry, element) + spec.itemsize - geometry.segment_offset(segment)
        needed[element[1]] = max(needed[element[1]], end)
    for committed in range(geometry.segment_stride_bytes + 1):
        whole = sum(need <= committed for need in needed)
        assert geometry.blocks_backed_by(committed) == whole
    for num_blocks in range(1, capacity + 1):
        size = geometry.committed_bytes_per_segment(num_blocks)
        assert size % granularity == 0
        assert geometry.blocks_backed_by(size) >= num_blocks
        assert size - granularity < needed[num_blocks - 1]


def is_one_stretch(geometry, elements):
    """Whether the elements touch one another, so that nothing else fits between them."""
    offsets = sorted(byte_of(geometry, element) for element in elements)
    return (
        offsets[-1] + geometry.spec.itemsize - offsets[0] == len(offsets) * geometry.spec.itemsize
    )


@every_layout
def test_predicates_follow_from_where_the_bytes_are(name):
    layout = KVCacheLayout(name)
    spec = KVCacheSpec(2, 3, 2, 1, "bfloat16", 4)
    geometry = GroupGeometry.build(spec, layout, 3, granularity=1)  # no padding, all extents > 1
    elements = list(laid_out(geometry))
    page = [e for e in elements if e[:2] == (1, 1)]
    in_memory_order = sorted(page, key=lambda e: byte_of(geometry, e))
    assert layout.is_layer_compact == is_one_stretch(geometry, [e for e in elements if e[0] == 1])
    assert layout.is_block_outermost == is_one_stretch(geometry, [e for e in elements if e[1] == 1])
    assert layout.is_block_compact == is_one_stretch(geometry, page)
    assert layout.is_page_hnc == (in_memory_order == sorted(page))
    assert layout.is_block_outermost == (geometry.num_segments == 1)


@every_layout
def test_axes_split_at_the_block(name):
    layout = KVCacheLayout(name)
    assert layout.segment_axes + "B" + layout.inner_axes == name
    geometry = GroupGeometry.build(KVCacheSpec(2, 3, 2, 1, "bfloat16", 4), layout, 5, 4096)
    inner = math.prod(extents(geometry)[axis] for axis in layout.inner_axes)
    assert geometry.segment_block_bytes == 2 * inner == geometry.strides[AXES.index("B")]


@every_layout
@pytest.mark.parametrize("axis", range(5))
@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_strides_of_a_peer_that_reckons_otherwise_are_refused(name, axis, change):
    spec = KVCacheSpec(2, 2, 2, 2, "bfloat16", 4)
    geometry = GroupGeometry.build(spec, KVCacheLayout(name), 3, 64)
    strides = list(geometry.strides)
    strides[axis] += change
    with pytest.raises(PlanError, match="strides"):
        dataclasses.replace(geometry, strides=tuple(strides))


@pytest.mark.parametrize("granularity", [0, -4096, 3, 4097])
def test_granularity_is_a_power_of_two(granularity):
    with pytest.raises(UsageError) as caught:
        GroupGeometry.build(
            KVCacheSpec(1, 1, 1, 1, "float32", 1), KVCacheLayout.LBHNC, 1, granularity
        )
    assert caught.value.field == "granularity"


def test_a_cache_without_blocks_is_refused():
    with pytest.raises(UsageError) as caught:
        GroupGeometry.build(KVCacheSpec(1, 1, 1, 1, "float32", 1), KVCacheLayout.BLHNC, 0, 4096)
    assert caught.value.field == "capacity_blocks"


@every_layout
def test_names_parse_in_any_case(name):
    for spelling in (name, name.lower(), name.capitalize()):
        assert KVCacheLayout.parse("kv_layout", spelling).value == name


@pytest.mark.parametrize("name", ["", "HND", "NBLHC", "LBHNC "])
def test_an_unknown_name_lists_the_six(name):
    with pytest.raises(UsageError) as caught:
        KVCacheLayout.parse("kv_layout", name)
    assert (caught.value.field, caught.value.value) == ("kv_layout", name)
    assert [known for known in NAMES if known in str(caught.value)] == NAMES


# --- several groups -------------------------------------------------------------------------------

granularities = st.sampled_from([1, 8, 64, 256])


@st.composite
def caches(draw):
    chosen = draw(st.lists(specs, min_size=1, max_size=3))
    layouts = [KVCacheLayout(draw(st.sampled_from(NAMES))) for _ in chosen]
    capacities = [draw(st.integers(1, 4)) for _ in chosen]
    return CacheGeometry.build(chosen, layouts, capacities, draw(granularities))


def bytes_of(group):
    """{byte in the reservation: (segment, element)} of all that a group holds."""
    found = {}
    for element, (segment, offset) in laid_out(group).items():
        for byte in range(offset, offset + group.spec.itemsize):
            found[group.offset + byte] = (segment, element)
    return found


@BUDGET
@given(caches())
def test_groups_lie_one_behind_the_other_and_never_share_a_granule(cache):
    owners, end = {}, 0
    for index, group in enumerate(cache.groups):
        assert group.offset == end
        end = group.end
        for byte, (segment, _) in bytes_of(group).items():
            assert group.offset <= byte < group.end
            owner = owners.setdefault(byte // cache.granularity, (index, segment))
            assert owner == (index, segment)
    assert end == cache.total_bytes == sum(group.total_bytes for group in cache.groups)
    assert cache.num_layers == sum(spec.num_layers for spec in cache.specs)


@BUDGET
@given(caches())
def test_an_offset_moves_a_group_and_changes_nothing_else(cache):
    for group in cache.groups:
        alone = dataclasses.replace(group, offset=0)
        assert bytes_of(group) == {group.offset + byte: e for byte, e in bytes_of(alone).items()}
        for segment in range(group.num_segments):
            start = group.segment_offset(segment)
            assert start == group.offset + alone.segment_offset(segment)
            for inside in (0, group.segment_stride_bytes - 1):
                assert group.offset_in_segment(start + inside) == inside


@BUDGET
@given(caches(), st.data())
def test_blocks_of_groups_come_to_their_bytes(cache, data):
    blocks = [data.draw(st.integers(0, group.capacity_blocks)) for group in cache.groups]
    held = sum(
        element[1] < count
        for group, count in zip(cache.groups, blocks, strict=True)
        for _, element in bytes_of(group).values()
    )
    assert cache.bytes_of(blocks) == held


ONE = KVCacheSpec(2, 1, 4, 4, "float32", 4)


@pytest.mark.parametrize("offset", [-4096, -1, 1, 2048, 4097])
def test_a_group_starts_at_a_granule(offset):
    with pytest.raises(PlanError, match="offset"):
        GroupGeometry.build(ONE, KVCacheLayout.LBHNC, 3, 4096, offset)


def test_groups_that_do_not_follow_each_other_are_refused():
    first, second = CacheGeometry.build([ONE, ONE], [KVCacheLayout.LBHNC] * 2, [3, 3], 4096).groups
    for groups in (
        (second,),
        (second, first),
        (first, first),
        (first, dataclasses.replace(second, offset=second.offset + 4096)),
        (first, dataclasses.replace(second, offset=0)),
        (first, GroupGeometry.build(ONE, KVCacheLayout.LBHNC, 3, 2048, second.offset)),
    ):
        with pytest.raises(PlanError, match="does not follow"):
            CacheGeometry(groups)


@pytest.mark.parametrize("count", [0, MAX_GROUPS + 1])
def test_the_number_of_groups_has_bounds(count):
    with pytest.raises(UsageError) as caught:
        CacheGeometry.build([ONE] * count, [KVCacheLayout.BLHNC] * count, [1] * count, 4096)
    assert (caught.value.field, caught.value.value) == ("groups", count)


def test_addresses_are_bounded_for_a_group_and_for_all_of_them():
    most = MAX_ADDRESSES // ONE.block_bytes
    with pytest.raises(UsageError) as caught:
        GroupGeometry.build(ONE, KVCacheLayout.BLHNC, most + 1, 4096)
    assert caught.value.field == "capacity_blocks"
    assert CacheGeometry.build([ONE], [KVCacheLayout.BLHNC], [most], 4096).total_bytes
    with pytest.raises(UsageError) as caught:
        CacheGeometry.build([ONE, ONE], [KVCacheLayout.BLHNC] * 2, [most, 1], 4096)
    assert caught.value.field == "groups"
