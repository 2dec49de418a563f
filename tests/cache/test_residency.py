"""A cache that shrinks, sleeps, wakes and is packed, over real host memory."""

import ctypes
import itertools
import os
import random

import pytest
import torch
from support.children import run_in_child
from support.faulty import FaultyDriver
from support.fixtures import num_open_files

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import (
    CacheAwake,
    CacheError,
    CacheSleeps,
    DriverError,
    MemoryPinned,
    OutOfMemory,
)
from kvxfer.memory.host import HostDriver

SPEC = KVCacheSpec(
    num_layers=3, num_kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32", block_size=16
)
CAPACITY = 40
NUM_STEPS = int(os.environ.get("KVXFER_RESIDENCY_STEPS", "300"))
every_layout = pytest.mark.parametrize("layout", KVCacheLayout)


@pytest.fixture
def make_cache():
    files, made = num_open_files(), []

    def make(layout=KVCacheLayout.LBHNC, driver=None):
        driver = driver or HostDriver(4096)
        made.append(KVCache(driver, CacheGeometry.build([SPEC], [layout], [CAPACITY], 4096)))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
    assert num_open_files() == files


def content(layer, block):
    size = SPEC.num_kv_heads * SPEC.block_size * SPEC.content_dim
    values = torch.arange(size, dtype=torch.float32) + size * (block * SPEC.num_layers + layer)
    return values.view(SPEC.num_kv_heads, SPEC.block_size, SPEC.content_dim)


def fill(cache, blocks):
    for layer, view in enumerate(cache.views[0]):
        for block in blocks:
            view[block] = content(layer, block)


def check(cache, blocks):
    for layer, view in enumerate(cache.views[0]):
        for block in blocks:
            assert torch.equal(view[block], content(layer, block)), (layer, block)


def grown(cache, *bounds):
    """Extended in small steps, so that there are many chunks, and filled."""
    for bound in bounds or range(1, CAPACITY + 1, 3):
        cache.extend([bound])
    fill(cache, range(cache.committed_blocks[0]))
    return cache


def picture(cache):
    pointers = [view.data_ptr() for view in cache.views[0]]
    return cache.committed_blocks, cache.committed_bytes, cache.buffer.base_address, pointers


def own_bytes():
    """Bytes of chunks that this process holds: what its memfds occupy."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "memfd:kvxfer" in os.readlink(entry.path):  # noqa: PTH115
                total += os.stat(entry.path).st_blocks * 512  # noqa: PTH116
        except OSError:
            continue
    return total


def faults(address):
    return run_in_child(lambda: ctypes.string_at(address, 1)) == -11


@every_layout
def test_shrinking_releases_whole_chunks_above_the_bound_in_every_segment(make_cache, layout):
    cache = grown(make_cache(layout))
    before, files = picture(cache), num_open_files()
    assert own_bytes() == cache.committed_bytes
    expected = cache.above([10])
    (bound,) = cache.blocks_after_shrink([10])
    gone = cache.shrink([10])
    assert gone == expected
    assert len(gone) >= cache.geometry.groups[0].num_segments
    assert cache.committed_blocks == (bound,)
    assert 10 <= bound < CAPACITY
    assert picture(cache)[2:] == before[2:], "base and views stay"
    assert num_open_files() == files - len(gone)
    assert own_bytes() == cache.committed_bytes == sum(c.size for c in cache.buffer.chunks)
    base, stride = cache.buffer.base_address, cache.geometry.groups[0].segment_stride_bytes
    ends = {chunk.offset % stride for chunk in gone}
    assert min(ends) == cache.committed_bytes // cache.geometry.groups[0].num_segments
    assert faults(base + gone[0].offset)
    assert not faults(base + gone[0].offset - 1)
    check(cache, range(bound))
    cache.extend([CAPACITY])
    check(cache, range(bound))


@every_layout
def test_a_chunk_with_the_bound_in_it_is_kept(make_cache, layout):
    cache = make_cache(layout)
    cache.extend([32])
    num_chunks = len(cache.buffer.chunks) // cache.geometry.groups[0].num_segments
    seen = set()
    for bound in range(33, 0, -1):
        after = cache.blocks_after_shrink([bound])
        cache.shrink([bound])
        assert cache.committed_blocks == after
        assert min(bound, 32) <= after[0]
        seen.add(len(cache.buffer.chunks))
    assert len(seen) == num_chunks, "chunk by chunk"
    assert cache.shrink([1]) == ()


def test_a_cache_does_not_shrink_to_nothing(make_cache):
    cache = grown(make_cache())
    for bound in (0, -1):
        with pytest.raises(CacheError, match=f"cannot shrink to {bound} blocks"):
            cache.shrink([bound])


@every_layout
def test_sleep_releases_all_and_wake_packs(make_cache, layout):
    cache = grown(make_cache(layout))
    files, before, many = num_open_files(), picture(cache), len(cache.buffer.chunks)
    cache.sleep()
    assert cache.is_asleep
    assert (own_bytes(), cache.committed_bytes, cache.committed_blocks) == (0, 0, (0,))
    assert cache.buffer.chunks == ()
    assert num_open_files() == files - many
    assert all(faults(pointer) for pointer in before[3])
    extension = cache.wake()
    assert (extension.old_blocks, extension.new_blocks) == ((0,), (CAPACITY,))
    assert picture(cache) == before
    assert len(cache.buffer.chunks) < many, "few large chunks"
    fill(cache, range(CAPACITY))
    check(cache, range(CAPACITY))


def test_a_sleeping_cache_cannot_be_touched_through_its_methods(make_cache):
    cache = grown(make_cache(), 9)
    cache.sleep()
    calls = [
        lambda: cache.views,
        lambda: cache.extend([3]),
        lambda: cache.shrink([3]),
        lambda: cache.above([3]),
        cache.sleep,
        cache.defragment,
    ]
    for call in calls:
        with pytest.raises(CacheSleeps, match=r"sleeps, \[1[0-9]\] blocks when awake"):
            call()
    cache.wake()
    with pytest.raises(CacheAwake, match=r"awake, with \[1[0-9]\] blocks committed"):
        cache.wake()


def test_a_cache_that_cannot_wake_sleeps_on(make_cache):
    driver = FaultyDriver(4096)
    cache = grown(make_cache(driver=driver))
    cache.sleep()
    for num_granted in range(3):
        driver.fail_after = num_granted
        with pytest.raises(OutOfMemory):
            cache.wake()
        assert cache.is_asleep
        assert own_bytes() == 0
    driver.fail_after = -1
    assert cache.wake().new_blocks == (CAPACITY,)


@every_layout
def test_defragmenting_keeps_every_byte_in_fewer_chunks(make_cache, layout):
    cache = grown(make_cache(layout))
    before, many, files = picture(cache), len(cache.buffer.chunks), num_open_files()
    left = cache.defragment()
    assert left == len(cache.buffer.chunks) == cache.geometry.groups[0].num_segments < many
    assert num_open_files() == files - many + left
    assert picture(cache) == before
    assert own_bytes() == cache.committed_bytes
    check(cache, range(CAPACITY))
    assert cache.defragment() == left
    cache.shrink([1])
    assert cache.committed_blocks == (CAPACITY,), "one chunk a segment: nothing lies wholly above"


def test_packed_chunks_are_no_larger_than_the_largest(make_cache):
    cache = make_cache()
    cache.buffer.largest_chunk_bytes = 16 * 1024
    grown(cache)
    cache.defragment()
    sizes = [chunk.size for chunk in cache.buffer.chunks]
    assert max(sizes) == 16 * 1024
    assert min(a + b for a, b in itertools.pairwise(sizes)) > 8 * 1024
    check(cache, range(CAPACITY))


class Refusing(HostDriver):
    """Refuses the nth call that acquires something or takes a watched address back, once."""

    countdown = -1
    watched = range(0)

    def _count(self):
        self.countdown -= 1
        if self.countdown == 0:
            raise DriverError("test", 5, "refused")

    def reserve(self, size_bytes):
        self._count()
        return super().reserve(size_bytes)

    def commit(self, address, size_bytes):
        self._count()
        return super().commit(address, size_bytes)

    def export(self, handle):
        self._count()
        return super().export(handle)

    def decommit(self, address, size_bytes, handle):
        if address in self.watched:
            self._count()
        super().decommit(address, size_bytes, handle)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_a_driver_that_refuses_once_costs_defragment_no_byte(make_cache, layout):
    driver = Refusing(4096)
    cache = grown(make_cache(KVCacheLayout(layout), driver))
    before, nth = picture(cache), 0
    base = cache.buffer.base_address
    driver.watched = range(base, base + cache.reserved_bytes)
    while True:
        nth += 1
        driver.countdown = nth
        try:
            cache.defragment()
        except DriverError as error:
            assert error.text == "refused"
            assert picture(cache) == before
            assert own_bytes() == cache.committed_bytes
            check(cache, range(CAPACITY))
            continue
        break
    driver.countdown = -1
    assert nth > 20
    check(cache, range(CAPACITY))


def test_too_little_memory_for_the_copy_changes_nothing(make_cache, monkeypatch):
    cache = grown(make_cache())
    info = cache.buffer._driver.memory_info()
    poor = type(info)(free_bytes=4096, total_bytes=info.total_bytes)
    monkeypatch.setattr(HostDriver, "memory_info", lambda self: poor)
    chunks = cache.buffer.chunks
    with pytest.raises(OutOfMemory, match="4096 are free"):
        cache.defragment()
    assert cache.buffer.chunks == chunks
    check(cache, range(CAPACITY))


# --- where a lost peer may still come ------------------------------------------------------------


def test_what_a_lost_peer_may_reach_becomes_a_tombstone(make_cache):
    cache = grown(make_cache())
    gone = cache.shrink([10], is_reachable=True)
    (bound,) = cache.committed_blocks
    tombs = cache.buffer.tombstones
    assert sum(tomb.size for tomb in tombs) == sum(chunk.size for chunk in gone)
    assert own_bytes() == cache.committed_bytes, "the memory itself is gone"
    address = cache.buffer.base_address + gone[0].offset
    ctypes.memset(address, 7, gone[0].size)  # the stale write: nobody crashes
    check(cache, range(bound))
    cache.extend([CAPACITY])
    assert cache.buffer.tombstones == ()
    assert ctypes.string_at(address, 16) == bytes(16), "what it wrote was thrown away"
    assert own_bytes() == cache.committed_bytes


def test_tombstones_fault_again_once_nobody_can_come(make_cache):
    cache = grown(make_cache())
    address = cache.buffer.base_address
    cache.sleep(is_reachable=True)
    assert not faults(address)
    cache.bury()
    assert cache.buffer.tombstones == ()
    assert faults(address)
    cache.wake()
    fill(cache, range(CAPACITY))
    check(cache, range(CAPACITY))


def test_part_of_a_tombstone_may_be_committed_again(make_cache):
    cache = grown(make_cache(KVCacheLayout.BLHNC), 1, 38)
    first = cache.committed_blocks
    cache.shrink([1], is_reachable=True)
    tomb = cache.buffer.tombstones[0]
    cache.extend([12])
    (left,) = cache.buffer.tombstones
    assert left.end == tomb.end
    assert left.offset == cache.committed_bytes
    assert cache.committed_blocks < first


@every_layout
def test_where_memory_cannot_be_retired_it_stays_pinned(make_cache, monkeypatch, layout):
    """Given up, readable, in nobody's use, and never handed out again until it is buried."""
    monkeypatch.setattr(HostDriver, "can_retire", False)
    cache = grown(make_cache(layout))
    everything, files = own_bytes(), num_open_files()
    gone = cache.shrink([10], is_reachable=True)
    (bound,) = cache.committed_blocks
    assert cache.buffer.pinned == gone
    assert cache.buffer.tombstones == ()
    assert not set(gone) & set(cache.buffer.chunks)
    assert own_bytes() == everything == cache.committed_bytes + sum(c.size for c in gone)
    assert num_open_files() == files
    address = cache.buffer.base_address + gone[0].offset
    ctypes.memset(address, 7, gone[0].size)  # the stale write: nobody crashes
    check(cache, range(bound))
    before = picture(cache)
    with pytest.raises(MemoryPinned, match="a lost peer may still reach"):
        cache.extend([CAPACITY])
    assert picture(cache) == before
    cache.bury()
    assert cache.buffer.pinned == ()
    assert own_bytes() == cache.committed_bytes
    assert faults(address)
    cache.extend([CAPACITY])
    assert ctypes.string_at(address, 16) == bytes(16)
    check(cache, range(bound))


def test_a_cache_with_pinned_memory_sleeps_until_it_is_buried(make_cache, monkeypatch):
    monkeypatch.setattr(HostDriver, "can_retire", False)
    cache = grown(make_cache())
    chunks, everything = cache.buffer.chunks, own_bytes()
    cache.sleep(is_reachable=True)
    assert (cache.is_asleep, cache.buffer.chunks, cache.buffer.pinned) == (True, (), chunks)
    assert (own_bytes(), cache.committed_bytes) == (everything, 0)
    for _ in range(2):
        with pytest.raises(MemoryPinned):
            cache.wake()
        assert cache.is_asleep
    cache.bury()
    assert own_bytes() == 0
    assert cache.wake().new_blocks == (CAPACITY,)
    fill(cache, range(CAPACITY))
    check(cache, range(CAPACITY))


@pytest.mark.parametrize("asleep", [False, True])
def test_close_releases_what_is_pinned(make_cache, monkeypatch, asleep):
    monkeypatch.setattr(HostDriver, "can_retire", False)
    cache = grown(make_cache())
    cache.shrink([10], is_reachable=True)
    if asleep:
        cache.sleep()
    assert cache.buffer.pinned
    cache.close()
    assert own_bytes() == 0


# --- everything, at random -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC"])
def test_any_sequence_of_steps_keeps_what_it_must(make_cache, layout):
    """KVXFER_RESIDENCY_STEPS asks for more of them."""
    chance, driver = random.Random(layout), FaultyDriver(4096)
    cache = make_cache(KVCacheLayout(layout), driver)
    cache.extend([1])
    base, pointers = cache.buffer.base_address, [view.data_ptr() for view in cache.views[0]]
    filled = 0
    for _ in range(NUM_STEPS):
        driver.fail_after = chance.choice([-1, -1, -1, 0, 1])
        step = chance.choice(["grow", "grow", "grow", "shrink", "shrink", "sleep", "wake", "pack"])
        asleep, bound = cache.is_asleep, chance.randint(1, CAPACITY)
        try:
            if step == "grow":
                cache.extend([bound])
            elif step == "shrink":
                cache.shrink([bound], is_reachable=chance.random() < 0.3)
            elif step == "sleep":
                cache.sleep(is_reachable=chance.random() < 0.3)
            elif step == "wake":
                cache.wake()
            else:
                cache.defragment()
        except (OutOfMemory, CacheSleeps, CacheAwake):
            assert cache.is_asleep == asleep, "what failed changed nothing"
        filled = 0 if cache.is_asleep else min(filled, cache.committed_blocks[0])
        assert own_bytes() == cache.committed_bytes
        assert len(cache.buffer.chunks) <= 8 * cache.geometry.groups[0].num_segments
        if cache.is_asleep:
            continue
        check(cache, range(filled))
        fill(cache, range(filled, cache.committed_blocks[0]))
        (filled,) = cache.committed_blocks
        assert (cache.buffer.base_address, [view.data_ptr() for view in cache.views[0]]) == (
            base, pointers,
        )  # fmt: skip
