"""A cache on a GPU that shrinks, sleeps, wakes and is packed, as it does on the host."""

import os
import random

import pytest
import torch
from support.fixtures import num_open_files
from support.residency_steps import walk

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import MemoryPinned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SPEC = KVCacheSpec(4, 8, 128, 128, "bfloat16", 16)
"""64 KiB a page."""
CAPACITY = 4096
STEPS = (1, 100, 300, 700, 1500, 2500, CAPACITY)
SLIDING = KVCacheSpec(3, 4, 64, 64, "bfloat16", 16, GroupKind.SLIDING, 512)
"""16 KiB a page."""
NUM_STEPS = int(os.environ.get("KVXFER_RESIDENCY_STEPS", "1000"))


@pytest.fixture
def cache():
    from kvxfer.memory.cuda import CudaDriver

    driver = CudaDriver()
    geometry = CacheGeometry.build([SPEC], [KVCacheLayout.LBHNC], [CAPACITY], driver.granularity)
    made = KVCache(driver, geometry)
    yield made
    made.close()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def fill(cache, start=0):
    (bound,) = cache.committed_blocks
    for layer, view in enumerate(cache.views[0]):
        blocks = torch.arange(start, bound, device=view.device) % 251 + layer
        view[start:bound] = blocks.to(torch.bfloat16).view(-1, 1, 1, 1)


def check(cache):
    (bound,) = cache.committed_blocks
    for layer, view in enumerate(cache.views[0]):
        blocks = torch.arange(bound, device=view.device) % 251 + layer
        expected = blocks.to(torch.bfloat16).view(-1, 1, 1, 1)
        assert bool((view[:bound] == expected).all())


def grown(cache):
    for bound in STEPS:
        cache.extend([bound])
    fill(cache)
    return cache


def test_pages_go_and_come_back_at_the_same_addresses(cache):
    before = free_bytes()
    grown(cache)
    committed, pointers = cache.committed_bytes, [view.data_ptr() for view in cache.views[0]]
    assert before - free_bytes() >= committed
    released = sum(chunk.size for chunk in cache.shrink([500]))
    assert cache.committed_bytes == committed - released < committed
    check(cache)
    cache.extend([CAPACITY])
    fill(cache)
    awake = free_bytes()
    cache.sleep()
    assert free_bytes() - awake == committed
    cache.wake()
    assert [view.data_ptr() for view in cache.views[0]] == pointers
    fill(cache)
    check(cache)


def test_packing_keeps_every_byte_and_can_be_done_again(cache):
    grown(cache)
    many, used = len(cache.buffer.chunks), free_bytes()
    assert cache.defragment() < many
    assert abs(free_bytes() - used) < cache.committed_bytes // 16, "the old memory is gone"
    check(cache)
    cache.shrink([1000])
    cache.extend([1500])
    cache.extend([CAPACITY])
    fill(cache)
    cache.defragment()
    check(cache)


def test_what_a_lost_peer_may_reach_stays_until_it_is_buried(cache):
    grown(cache)
    chunks, committed = cache.buffer.chunks, cache.committed_bytes
    awake = free_bytes()
    cache.sleep(is_reachable=True)
    assert (cache.committed_bytes, cache.buffer.chunks) == (0, ())
    assert cache.buffer.pinned == chunks
    assert free_bytes() == awake, "the memory is still there"
    with pytest.raises(MemoryPinned):
        cache.wake()
    assert cache.is_asleep
    cache.bury()
    assert cache.buffer.pinned == ()
    assert free_bytes() - awake == committed
    cache.wake()
    fill(cache)
    check(cache)


def test_what_stays_pinned_is_no_bar_to_the_blocks_below_it(cache):
    grown(cache)
    gone = cache.shrink([1000], is_reachable=True)
    assert cache.buffer.pinned == gone
    check(cache)
    cache.extend([cache.committed_blocks[0]])
    with pytest.raises(MemoryPinned):
        cache.extend([CAPACITY])
    check(cache)
    cache.bury()
    cache.extend([CAPACITY])
    fill(cache)
    check(cache)


def take_steps(driver, layouts, num_steps):
    """A walk through a cache of two groups that is closed at its end."""
    geometry = CacheGeometry.build([SPEC, SLIDING], layouts, [1024, 2048], driver.granularity)
    made = KVCache(driver, geometry)
    try:
        made.extend([1, 1])
        return walk(made, num_steps, random.Random(str(layouts)))
    finally:
        made.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("names", [("LBNHC", "LBNHC"), ("BLHNC", "LHBNC")], ids="-".join)
def test_a_long_walk_keeps_every_byte_and_leaks_nothing(names):
    """KVXFER_RESIDENCY_STEPS: how long."""
    from kvxfer.memory.cuda import CudaDriver

    layouts = [KVCacheLayout(name) for name in names]
    driver = CudaDriver()
    take_steps(driver, layouts, 30)  # kernels are loaded, which takes memory, too
    torch.cuda.empty_cache()
    before, files = free_bytes(), num_open_files()
    done = take_steps(driver, layouts, NUM_STEPS)
    torch.cuda.empty_cache()
    assert (free_bytes(), num_open_files()) == (before, files)
    assert done.total() == NUM_STEPS
    if NUM_STEPS >= 100:
        assert all(done[step] for step in ("grow", "shrink", "sleep", "wake", "pack", "bury")), done
