"""Caches of several groups in one reservation: each has its shape, layout and bound, and none ever
touches another's memory."""

import itertools
import os
import random

import pytest
import torch
from support.children import run_in_child
from support.faulty import FaultyDriver
from support.fixtures import num_open_files
from support.residency_steps import Contents, check_chunks, walk

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import CapacityExceeded, OutOfMemory
from kvxfer.memory.host import HostDriver

NUM_STEPS = int(os.environ.get("KVXFER_RESIDENCY_STEPS", "60"))
GRANULE = 4096
FULL = KVCacheSpec(3, 2, 8, 8, "float32", 16)
"""2 KiB a page: half a granule."""
SLIDING = KVCacheSpec(2, 1, 12, 4, "bfloat16", 16, GroupKind.SLIDING, 40)
"""512 bytes a page: eight in a granule."""
ODD = KVCacheSpec(2, 3, 20, 4, "float32", 7, GroupKind.CROSS)
"""2,016 bytes a page: blocks lie across the edges of granules."""
LATENT = KVCacheSpec(1, 1, 576, 0, "float8_e4m3fn", 16, GroupKind.MLA)
"""9 KiB a page: two granules and a quarter."""
CAPACITIES = {FULL: 24, SLIDING: 40, ODD: 30, LATENT: 9}
CASES = [
    ([FULL, SLIDING], ["LBNHC", "LBNHC"]),
    ([FULL, SLIDING], ["BLHNC", "LHBNC"]),
    ([SLIDING, ODD, LATENT], ["BHLNC", "LBHNC", "BLNHC"]),
    ([LATENT, FULL, ODD], ["LBNHC", "LHBNC", "BHLNC"]),
]
every_case = pytest.mark.parametrize(
    ("specs", "layouts"), CASES, ids=["-".join(layouts) for _, layouts in CASES]
)


@pytest.fixture
def make_cache():
    files, made = num_open_files(), []

    def make(specs, layouts, driver=None):
        names = [KVCacheLayout(name) for name in layouts]
        capacities = [CAPACITIES[spec] for spec in specs]
        geometry = CacheGeometry.build(specs, names, capacities, GRANULE)
        made.append(KVCache(driver or HostDriver(GRANULE), geometry))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
    assert num_open_files() == files


def own(cache, index):
    """The chunks of one group."""
    group = cache.geometry.groups[index]
    return [c for c in cache.buffer.chunks if group.offset <= c.offset < group.end]


def full(cache):
    return [group.capacity_blocks for group in cache.geometry.groups]


def filled(cache, *bounds):
    cache.extend(bounds)
    contents = Contents(cache)
    contents.fill()
    return contents


@every_case
def test_each_group_has_views_of_its_own_shape(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    assert cache.committed_blocks == (0,) * len(specs)
    for spec, views, capacity in zip(specs, cache.views, full(cache), strict=True):
        assert len(views) == spec.num_layers
        for view in views:
            assert view.shape == (
                capacity, spec.num_kv_heads, spec.block_size, spec.head_dim_k + spec.head_dim_v,
            )  # fmt: skip
            assert view.dtype == getattr(torch, spec.dtype)


@every_case
def test_all_of_every_group_can_be_filled_at_once(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    contents = filled(cache, *full(cache))
    assert cache.committed_blocks == tuple(full(cache))
    assert cache.committed_bytes <= cache.reserved_bytes
    check_chunks(cache)
    contents.check()


@every_case
def test_one_group_grows_and_shrinks_and_the_others_notice_nothing(make_cache, specs, layouts):
    for index in range(len(specs)):
        cache = make_cache(specs, layouts)
        contents = filled(cache, *[4] * len(specs))
        start, chunks = cache.committed_blocks, cache.buffer.chunks
        others = [i for i in range(len(specs)) if i != index]
        before = [own(cache, i) for i in others]
        for bound in (start[index] + 1, full(cache)[index]):
            wanted = [bound if i == index else 0 for i in range(len(specs))]
            extension = cache.extend(wanted)
            assert set(extension.chunks) <= set(own(cache, index))
            assert [cache.committed_blocks[i] for i in others] == [start[i] for i in others]
            contents.check()
            contents.fill()
        gone = cache.shrink([4 if i == index else full(cache)[i] for i in range(len(specs))])
        assert gone
        assert [own(cache, i) for i in others] == before
        contents.follow()
        contents.check()
        cache.shrink([4] * len(specs))
        assert cache.committed_blocks[index] == start[index]
        assert {(c.offset, c.size) for c in chunks} == {
            (c.offset, c.size) for c in cache.buffer.chunks
        }


@every_case
def test_each_group_ends_at_its_own_bound(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    cache.extend([2 + index for index in range(len(specs))])
    for group, (views, bound) in enumerate(zip(cache.views, cache.committed_blocks, strict=True)):
        assert bound < full(cache)[group]

        def touch(block, view=views[-1]):
            view.view(torch.uint8)[block][-1, -1, -1] = 1

        assert run_in_child(lambda bound=bound, touch=touch: touch(bound - 1)) == 0
        assert run_in_child(lambda bound=bound, touch=touch: touch(bound)) == -11


def everything(cache):
    return cache.committed_blocks, cache.committed_bytes, cache.buffer.chunks, num_open_files()


@every_case
def test_a_fault_in_any_groups_commit_leaves_all_groups_as_they_were(make_cache, specs, layouts):
    driver = FaultyDriver(GRANULE)
    cache = make_cache(specs, layouts, driver)
    contents = filled(cache, *[2] * len(specs))
    before = everything(cache)
    for num_granted in itertools.count():
        driver.fail_after = num_granted
        try:
            extension = cache.extend(full(cache))
        except OutOfMemory:
            assert everything(cache) == before
            contents.check()
            continue
        break
    assert num_granted == len(extension.chunks) > len(specs)
    assert extension.old_blocks == before[0]
    assert extension.new_blocks == tuple(full(cache))
    contents.check()


@every_case
def test_beyond_one_groups_capacity_no_group_grows(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    contents = filled(cache, *[2] * len(specs))
    before = everything(cache)
    for index, capacity in enumerate(full(cache)):
        wanted = [capacity + 1 if i == index else n for i, n in enumerate(full(cache))]
        with pytest.raises(CapacityExceeded, match=f"{capacity + 1} blocks asked for"):
            cache.extend(wanted)
        assert everything(cache) == before
    contents.check()


@every_case
def test_retract_takes_back_the_newest_extension_of_all_groups(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    contents = filled(cache, *[1] * len(specs))
    pictures, extensions = [everything(cache)], []
    for wanted in ([n // 2 for n in full(cache)], [0, *full(cache)[1:]], full(cache)):
        extensions.append(cache.extend(wanted))
        pictures.append(everything(cache))
    for extension in reversed(extensions):
        assert everything(cache) == pictures.pop()
        cache.retract(extension)
        contents.check()
    assert everything(cache) == pictures.pop()


@every_case
def test_what_sleeps_wakes_with_as_many_blocks_of_each_group(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    contents = filled(cache, *[3 + 2 * index for index in range(len(specs))])
    blocks = cache.committed_blocks
    cache.sleep()
    assert (cache.committed_blocks, cache.committed_bytes) == ((0,) * len(specs), 0)
    contents.follow()
    extension = cache.wake()
    assert (extension.old_blocks, extension.new_blocks) == ((0,) * len(specs), blocks)
    contents.fill()
    contents.check()


@every_case
def test_packing_never_joins_two_groups_or_segments(make_cache, specs, layouts):
    cache = make_cache(specs, layouts)
    contents = filled(cache, *[1] * len(specs))
    for share in (4, 3, 2, 1):
        cache.extend([max(1, n // share) for n in full(cache)])
        contents.fill()
    left = cache.defragment()
    assert left == sum(group.num_segments for group in cache.geometry.groups)
    check_chunks(cache)
    contents.check()


@every_case
@pytest.mark.parametrize("can_retire", [True, False], ids=["tombstones", "pinned"])
def test_a_random_walk_keeps_every_byte_and_leaks_nothing(
    make_cache, monkeypatch, specs, layouts, can_retire
):
    """KVXFER_RESIDENCY_STEPS asks for more of them. Commits are refused now and then."""
    monkeypatch.setattr(HostDriver, "can_retire", can_retire)
    files, driver = num_open_files(), FaultyDriver(GRANULE)
    cache = make_cache(specs, layouts, driver)
    cache.buffer.largest_chunk_bytes = 4 * GRANULE
    cache.extend([1] * len(specs))
    chance = random.Random(f"{layouts} {can_retire}")

    def perhaps_fail():
        driver.fail_after = chance.choice([-1, -1, -1, -1, 0, 1, 3])

    def account():
        held = len(cache.buffer.chunks) + len(cache.buffer.pinned)
        assert num_open_files() == files + held, "one descriptor a chunk"
        assert not (cache.buffer.pinned if can_retire else cache.buffer.tombstones)

    done = walk(cache, NUM_STEPS, chance, perhaps_fail, account)
    assert done["refused"] < NUM_STEPS
    assert all(done[step] for step in ("grow", "shrink", "sleep", "wake", "pack", "bury")), done
    cache.close()
    assert num_open_files() == files
