"""The growable cache over real host memory, and how far it grows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.children import run_in_child
from support.examples import examples
from support.faulty import FaultyDriver
from support.fixtures import num_open_files

from kvxfer.cache.budget import GROWTH_FACTOR, next_growth, open_files_needed
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import CapacityExceeded, OutOfMemory
from kvxfer.memory.chunks import LARGEST_CHUNK, chunk_sizes
from kvxfer.memory.host import HostDriver

BUDGET = settings(max_examples=examples(40, 150), deadline=None, derandomize=True)
SPEC = KVCacheSpec(
    num_layers=3, num_kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32", block_size=16
)
"""2 KiB a page: two, four or, B outermost, two thirds of a block a granule of 4 KiB."""
CAPACITY = 40
every_layout = pytest.mark.parametrize("layout", KVCacheLayout)


@pytest.fixture
def make_cache():
    files, made = num_open_files(), []

    def make(layout, driver=None, spec=SPEC, capacity=CAPACITY):
        driver = driver or HostDriver(4096)
        geometry = CacheGeometry.build([spec], [layout], [capacity], driver.granularity)
        made.append(KVCache(driver, geometry))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
    assert num_open_files() == files


def state(cache):
    return (
        cache.committed_blocks,
        cache.committed_bytes,
        cache.buffer.chunks,
        cache.buffer.base_address,
    )


def committed_prefixes(cache):
    """What the chunks cover, by segment: each must start at the segment's first byte."""
    (group,) = cache.geometry.groups
    stride = group.segment_stride_bytes
    prefixes = []
    for segment in range(group.num_segments):
        start = segment * stride
        end = start
        for chunk in cache.buffer.chunks:
            if start <= chunk.offset < start + stride:
                assert chunk.offset == end, "a hole in the committed prefix"
                end += chunk.size
        prefixes.append(end - start)
    assert sum(prefixes) == sum(chunk.size for chunk in cache.buffer.chunks)
    return prefixes


@every_layout
def test_a_reservation_commits_nothing(make_cache, layout):
    cache = make_cache(layout)
    assert (cache.committed_blocks, cache.committed_bytes, cache.buffer.chunks) == ((0,), 0, ())
    assert cache.reserved_bytes == cache.geometry.total_bytes
    assert len(cache.views[0]) == SPEC.num_layers


@every_layout
def test_growth_moves_nothing_and_adds_whole_blocks(make_cache, layout):
    """Reserve, extend, extend again: base, views and contents stay; every byte is there."""
    cache = make_cache(layout)
    base = cache.buffer.base_address
    pointers = [view.data_ptr() for view in cache.views[0]]
    written = 0
    for wanted in (1, 2, 7, 8, 23, CAPACITY):
        extension = cache.extend([wanted])
        (bound,) = cache.committed_blocks
        assert extension.new_blocks == (bound,)
        assert bound >= wanted
        assert extension.old_blocks == (written,)
        for layer, view in enumerate(cache.views[0]):
            for block in range(written, bound):
                view[block] = content(layer, block)
        written = bound
        assert cache.buffer.base_address == base
        assert [view.data_ptr() for view in cache.views[0]] == pointers
        for layer, view in enumerate(cache.views[0]):
            for block in range(bound):
                assert torch.equal(view[block], content(layer, block))
        prefixes = committed_prefixes(cache)
        assert len(set(prefixes)) == 1
        assert cache.geometry.groups[0].blocks_backed_by(prefixes[0]) == bound
        assert cache.committed_bytes == sum(prefixes)
    assert written == CAPACITY


def content(layer, block):
    """Every element of a block different, and different from those of all others."""
    size = SPEC.num_kv_heads * SPEC.block_size * SPEC.content_dim
    values = torch.arange(size, dtype=torch.float32) + size * (block * SPEC.num_layers + layer)
    return values.view(SPEC.num_kv_heads, SPEC.block_size, SPEC.content_dim)


@every_layout
def test_extending_to_what_is_there_adds_nothing(make_cache, layout):
    cache = make_cache(layout)
    cache.extend([9])
    before = state(cache)
    for wanted in (0, 1, 9, cache.committed_blocks[0]):
        extension = cache.extend([wanted])
        assert (extension.chunks, extension.old_blocks) == ((), extension.new_blocks)
    assert state(cache) == before


@every_layout
def test_the_first_block_beyond_the_bound_faults(make_cache, layout):
    cache = make_cache(layout)
    cache.extend([3])
    (bound,) = cache.committed_blocks
    # Its last byte: the first may lie in the granule that the block before it needs.
    last = (-1, -1, -1)

    def touch_inside():
        cache.views[0][-1][bound - 1][last] = 1.0

    def touch_outside():
        cache.views[0][-1][bound][last] = 1.0

    assert run_in_child(touch_inside) == 0
    assert run_in_child(touch_outside) == -11


@every_layout
def test_beyond_the_capacity_nothing_is_committed(make_cache, layout):
    cache = make_cache(layout)
    cache.extend([5])
    before = state(cache)
    with pytest.raises(CapacityExceeded, match="41 blocks asked for, 40 are reserved"):
        cache.extend([CAPACITY + 1])
    assert state(cache) == before
    cache.extend([CAPACITY])
    assert cache.committed_blocks == (CAPACITY,)


@every_layout
def test_a_driver_that_fails_at_any_commit_leaves_the_cache_as_it_was(make_cache, layout):
    driver = FaultyDriver(4096)
    cache = make_cache(layout, driver)
    cache.extend([4])
    cache.views[0][0][1] = 7.0
    before, files = state(cache), num_open_files()
    num_failures = 0
    while True:
        driver.fail_after = num_failures
        try:
            extension = cache.extend([33])
        except OutOfMemory:
            num_failures += 1
            assert state(cache) == before
            assert num_open_files() == files
            continue
        break
    assert num_failures == len(extension.chunks) > 1
    assert cache.committed_blocks[0] >= 33
    assert (cache.views[0][0][1] == 7.0).all()


@every_layout
def test_retract_takes_back_exactly_the_newest_extension(make_cache, layout):
    cache = make_cache(layout)
    before = [state(cache)]
    extensions = []
    for wanted in (2, 11, CAPACITY):
        extensions.append(cache.extend([wanted]))
        before.append(state(cache))
    for extension in reversed(extensions):
        assert state(cache) == before.pop()
        cache.retract(extension)
    assert state(cache) == before.pop()
    assert cache.extend([CAPACITY]).old_blocks == (0,)


def test_retracting_nothing_does_nothing(make_cache):
    cache = make_cache(KVCacheLayout.LBHNC)
    cache.extend([4])
    before = state(cache)
    cache.retract(cache.extend([1]))
    assert state(cache) == before


def test_close_is_idempotent_and_gives_everything_back(make_cache):
    files = num_open_files()
    cache = make_cache(KVCacheLayout.LHBNC)
    cache.extend([CAPACITY])
    assert num_open_files() > files
    cache.close()
    cache.close()
    assert num_open_files() == files
    assert (cache.committed_blocks, cache.committed_bytes) == ((0,), 0)


# --- how far, how often, in how many pieces ----------------------------------------------------


@st.composite
def geometries(draw):
    spec = KVCacheSpec(
        num_layers=draw(st.sampled_from([1, 2, 5, 28, 32, 61, 80])),
        num_kv_heads=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim_k=draw(st.sampled_from([1, 64, 96, 128, 576])),
        head_dim_v=draw(st.sampled_from([0, 64, 128])),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])),
        block_size=draw(st.sampled_from([1, 16, 24, 64])),
    )
    layout = draw(st.sampled_from(list(KVCacheLayout)))
    capacity = draw(st.integers(2, 20_000))
    granularity = draw(st.sampled_from([4096, 65536, 2 << 20]))
    return GroupGeometry.build(spec, layout, capacity, granularity)


def backed(geometry, num_blocks):
    """What is committed when `num_blocks` were asked for: whole granules hold more, perhaps."""
    return geometry.blocks_backed_by(geometry.committed_bytes_per_segment(num_blocks))


@BUDGET
@given(geometries(), st.data())
def test_a_step_covers_what_is_needed_and_stays_within_the_bound(geometry, data):
    bound = data.draw(st.integers(2, geometry.capacity_blocks))
    committed = backed(geometry, data.draw(st.integers(1, bound)))
    needed = data.draw(st.integers(1, bound))
    target = next_growth(geometry, committed, needed, bound)
    assert target <= bound
    assert target >= min(needed, bound)
    assert target >= min(bound, math.ceil(committed * GROWTH_FACTOR))


def sizes_of_step(geometry, committed, target):
    start = geometry.committed_bytes_per_segment(committed)
    end = geometry.committed_bytes_per_segment(target)
    return chunk_sizes(max(0, end - start), geometry.granularity, LARGEST_CHUNK)


@BUDGET
@given(geometries(), st.data())
def test_a_step_costs_few_small_chunks(geometry, data):
    """One below the largest size, unless the bound cuts it short or blocks fit no power of two."""
    bound = geometry.capacity_blocks
    committed = backed(geometry, data.draw(st.integers(1, bound)))
    needed = data.draw(st.integers(1, bound))
    target = next_growth(geometry, committed, needed, bound)
    granules = geometry.segment_block_bytes / geometry.granularity
    if target < bound and (granules <= 1 or math.log2(granules).is_integer()):
        sizes = sizes_of_step(geometry, committed, target)
        assert len([size for size in sizes if size < LARGEST_CHUNK]) <= 1


@BUDGET
@given(geometries(), st.data())
def test_open_files_needed_is_an_upper_bound(geometry, data):
    """Of every way to grow from one block to the bound, each step for what some request needs."""
    bound = data.draw(st.integers(2, geometry.capacity_blocks))
    committed = backed(geometry, 1)
    num_chunks = len(sizes_of_step(geometry, 0, 1))
    first = data.draw(st.integers(1, bound))
    num_chunks += len(sizes_of_step(geometry, committed, first))
    committed = max(committed, backed(geometry, first))
    steps = data.draw(st.lists(st.integers(1, 400), max_size=40)) + [1] * 200
    for more in steps:
        if committed >= bound:
            break
        target = next_growth(geometry, committed, min(bound, committed + more), bound)
        num_chunks += len(sizes_of_step(geometry, committed, target))
        assert backed(geometry, target) > committed
        committed = backed(geometry, target)
    assert committed >= bound
    assert num_chunks * geometry.num_segments <= open_files_needed(geometry, bound, LARGEST_CHUNK)
