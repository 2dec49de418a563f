"""A cache on a GPU that shrinks, sleeps, wakes and is packed, as it does on the host."""

import pytest
import torch

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import MemoryPinned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SPEC = KVCacheSpec(4, 8, 128, 128, "bfloat16", 16)
"""64 KiB a page."""
CAPACITY = 4096
STEPS = (1, 100, 300, 700, 1500, 2500, CAPACITY)


@pytest.fixture
def cache():
    from kvxfer.memory.cuda import CudaDriver

    driver = CudaDriver()
    geometry = CacheGeometry.build(SPEC, KVCacheLayout.LBHNC, CAPACITY, driver.granularity)
    made = KVCache(driver, geometry)
    yield made
    made.close()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def fill(cache, start=0):
    for layer, view in enumerate(cache.views):
        blocks = torch.arange(start, cache.committed_blocks, device=view.device) % 251 + layer
        view[start : cache.committed_blocks] = blocks.to(torch.bfloat16).view(-1, 1, 1, 1)


def check(cache):
    for layer, view in enumerate(cache.views):
        blocks = torch.arange(cache.committed_blocks, device=view.device) % 251 + layer
        expected = blocks.to(torch.bfloat16).view(-1, 1, 1, 1)
        assert bool((view[: cache.committed_blocks] == expected).all())


def grown(cache):
    for bound in STEPS:
        cache.extend(bound)
    fill(cache)
    return cache


def test_pages_go_and_come_back_at_the_same_addresses(cache):
    before = free_bytes()
    grown(cache)
    committed, pointers = cache.committed_bytes, [view.data_ptr() for view in cache.views]
    assert before - free_bytes() >= committed
    released = sum(chunk.size for chunk in cache.shrink(500))
    assert cache.committed_bytes == committed - released < committed
    check(cache)
    cache.extend(CAPACITY)
    fill(cache)
    awake = free_bytes()
    cache.sleep()
    assert free_bytes() - awake == committed
    cache.wake()
    assert [view.data_ptr() for view in cache.views] == pointers
    fill(cache)
    check(cache)


def test_packing_keeps_every_byte_and_can_be_done_again(cache):
    grown(cache)
    many, used = len(cache.buffer.chunks), free_bytes()
    assert cache.defragment() < many
    assert abs(free_bytes() - used) < cache.committed_bytes // 16, "the old memory is gone"
    check(cache)
    cache.shrink(1000)
    cache.extend(1500)
    cache.extend(CAPACITY)
    fill(cache)
    cache.defragment()
    check(cache)


def test_what_a_lost_peer_may_reach_stays(cache):
    grown(cache)
    with pytest.raises(MemoryPinned):
        cache.sleep(is_reachable=True)
    check(cache)
