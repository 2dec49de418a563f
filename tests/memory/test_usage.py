"""What a process takes of the host's memory, the cache apart; and plain memory as a driver."""

import numpy as np
import pytest

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import DriverError
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.host import HostDriver
from kvxfer.memory.usage import UsageMeter
from kvxfer.memory.virtual_buffer import VirtualBuffer

MIB = 1 << 20


def test_what_is_allocated_counts_and_the_cache_does_not():
    meter = UsageMeter(HostDriver())
    before = meter.used_bytes(0)
    taken = np.ones(64 * MIB, dtype=np.uint8)
    with VirtualBuffer(HostDriver(), 64 * MIB) as cache:
        cache.commit([(0, 32 * MIB)])
        used = meter.used_bytes(32 * MIB)
    assert used - before == pytest.approx(taken.nbytes, abs=8 * MIB)


def test_a_moment_is_remembered_as_peak():
    meter = UsageMeter(HostDriver())
    passing = np.ones(96 * MIB, dtype=np.uint8)
    del passing
    used = meter.used_bytes(0)
    assert meter.peak_bytes(used, 0) > 64 * MIB


def test_a_worker_may_use_its_share_and_its_budget_whichever_is_less():
    meter = UsageMeter(HostDriver())
    total = meter.at_start.total_bytes
    assert meter.available_bytes(0.01, 0) == int(0.01 * total)
    assert meter.available_bytes(0.01, MIB) == MIB
    assert meter.available_bytes(1.0, 0) <= total
    assert not meter.shared_with()


def test_plain_memory_serves_as_a_cache_that_does_not_grow():
    spec = KVCacheSpec(2, 2, 8, 8, "float32", 16)
    driver = FixedDriver("cpu")
    geometry = CacheGeometry.build([spec], [KVCacheLayout.LBHNC], [64], driver.granularity)
    cache = KVCache(driver, geometry)
    base = cache.buffer.base_address
    cache.extend([64])
    cache.views[0][1][63].fill_(7)
    assert cache.buffer.base_address == base
    assert cache.committed_blocks == (64,)
    assert float(cache.views[0][1][63].sum()) == 7 * 2 * 16 * 16
    with pytest.raises(DriverError, match="fixed memory"):
        cache.buffer.export(cache.buffer.chunks[0])
    cache.close()
    assert driver.memory_info().free_bytes > 0


def test_a_peak_from_before_the_measurement_is_forgotten():
    gone = bytearray(b"\1" * (192 << 20))
    del gone
    meter = UsageMeter(HostDriver(4096))
    used = meter.used_bytes(0)
    assert meter.peak_bytes(used, 0) < 64 << 20
    later = bytearray(b"\1" * (192 << 20))
    del later
    assert meter.peak_bytes(meter.used_bytes(0), 0) > 128 << 20
