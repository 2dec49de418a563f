"""Checksums on a GPU: those of the host, without waiting, over memory that grows.

Run with TRITON_INTERPRET=0: in Triton's interpreter the kernel reads no GPU memory.
"""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.transfer.checksum import combined, kv_checksum, start_checksum
from kvxfer.transfer.checksum_shard import KVShard

pytest.importorskip("triton", reason="triton is not installed")

from kvxfer.transfer.checksum_kernel import is_interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(is_interpreted(), reason="Triton's interpreter is on: TRITON_INTERPRET=0"),
]

SPECS = {
    "full": KVCacheSpec(4, 8, 128, 128, "bfloat16", 16),
    "latent": KVCacheSpec(3, 1, 576, 0, "bfloat16", 64, GroupKind.MLA),
    "small words": KVCacheSpec(2, 3, 33, 22, "bfloat16", 12),
    "bytes": KVCacheSpec(2, 2, 7, 8, "float8_e5m2", 16),
}
PROMPT = KVCacheSpec(32, 8, 128, 128, "bfloat16", 16)
"""2 MiB a block."""
SPIN_CYCLES = 1_000_000_000
"""Half a second and more, of a kernel that does nothing."""


@pytest.fixture
def make_cache():
    from kvxfer.memory.cuda import CudaDriver

    driver = CudaDriver()
    made = []

    def make(spec, layout, num_blocks, capacity=8192):
        geometry = CacheGeometry.build([spec], [layout], [capacity], driver.granularity)
        cache = KVCache(driver, geometry)
        made.append(cache)
        cache.extend([num_blocks])
        return cache

    yield make
    torch.cuda.synchronize()
    for cache in made:
        cache.close()


def bits(view):
    return view.view({1: torch.int8, 2: torch.int16}[view.element_size()])


def fill(views, blocks):
    """Random bits, NaNs among them, in `blocks`."""
    index = torch.tensor(blocks, device="cuda")
    for view in views:
        there = bits(view)
        info = torch.iinfo(there.dtype)
        shape = (len(blocks), *view.shape[1:])
        there[index] = torch.randint(
            info.min, info.max + 1, shape, dtype=there.dtype, device="cuda"
        )


def on_host(views, blocks):
    """What the blocks hold, as blocks 0, 1, 2, … of views on the host."""
    index = torch.tensor(blocks, device="cuda")
    return [bits(view)[index].cpu().view(view.dtype) for view in views]


def some_blocks(count, below, seed=0):
    return random.Random(seed).sample(range(1, below), count)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_equals_the_host(make_cache, layout, name):
    spec, count = SPECS[name], 40
    (views,) = make_cache(spec, layout, 200).views
    blocks = some_blocks(count, 200)
    fill(views, blocks)
    heads = spec.num_kv_heads
    there = KVShard(views, heads + 3, 2, group=1)
    here = KVShard(on_host(views, blocks), heads + 3, 2, group=1)
    end = (5 + count) * spec.block_size
    for tokens in (range(5 * spec.block_size, end), range(end - 333, end - 7)):
        for layers in (None, range(1, 2)):
            found = kv_checksum(there, blocks, tokens, layers, first_entry=5)
            assert found == kv_checksum(here, range(count), tokens, layers, first_entry=5)
    halves = [
        KVShard([view[:, part] for view in views], heads + 3, 2 + part.start, group=1)
        for part in (slice(0, 1), slice(1, heads))
        if part.start < heads
    ]
    tokens = range(count * spec.block_size)
    parts = [kv_checksum(half, blocks, tokens) for half in halves]
    assert combined(parts) == kv_checksum(there, blocks, tokens)


def test_one_flipped_bit_shows(make_cache):
    (views,) = make_cache(PROMPT, KVCacheLayout.LBNHC, 300).views
    blocks = some_blocks(256, 300)
    fill(views, blocks)
    shard, tokens = KVShard(views, 8), range(4096)
    before = kv_checksum(shard, blocks, tokens)
    bits(views[17])[blocks[100], 3, 7, 200] ^= 1 << 9
    assert kv_checksum(shard, blocks, tokens) != before
    bits(views[17])[blocks[100], 3, 7, 200] ^= 1 << 9
    assert kv_checksum(shard, blocks, tokens) == before


def test_starting_waits_for_nothing_and_follows_the_stream(make_cache):
    """The KV is written by the stream long after `start_checksum` returned."""
    spec, layout = SPECS["full"], KVCacheLayout.LBHNC
    (views,) = make_cache(spec, layout, 200).views
    blocks, tokens = some_blocks(40, 200), range(640)
    shard = KVShard(views, 8)
    fill(views, blocks)
    old = kv_checksum(shard, blocks, tokens)
    index, source = torch.tensor(blocks, device="cuda"), torch.randn(40, 8, 16, 256).cuda()
    source = source.to(torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(SPIN_CYCLES)
            for view in views:
                view.index_copy_(0, index, source)
            pending = start_checksum(shard, blocks, tokens)
            was_ready = pending.is_ready
        finally:
            torch.cuda.set_sync_debug_mode("default")
        blocks[:] = [0] * 40
    found = pending.result()
    assert not was_ready
    assert pending.is_ready
    here = KVShard(on_host(views, index.tolist()), 8)
    assert found == kv_checksum(here, range(40), tokens) != old


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BLNHC])
def test_a_shard_made_before_growth_sees_what_grew(make_cache, layout):
    cache = make_cache(PROMPT, layout, 1)
    shard = KVShard(cache.views[0], 8)
    (granule_blocks,) = cache.committed_blocks
    kv_checksum(shard, [0], range(16))
    cache.extend([granule_blocks + 100])
    blocks = [granule_blocks + 99, 0, granule_blocks + 3]
    fill(cache.views[0], blocks)
    here = KVShard(on_host(cache.views[0], blocks), 8)
    found = kv_checksum(shard, blocks, range(3, 44))
    assert found == kv_checksum(here, range(3), range(3, 44))


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_a_long_prompt_at_the_rate_of_its_memory(make_cache, layout, capsys):
    """4,096 tokens, 512 MiB, in blocks at random places. Far quicker than any link brings them."""
    (views,) = make_cache(PROMPT, layout, 1024).views
    blocks = some_blocks(256, 1024)
    fill(views, blocks)
    shard, tokens = KVShard(views, 8), range(4096)
    found = kv_checksum(shard, blocks, tokens)
    assert found == kv_checksum(KVShard(on_host(views, blocks), 8), range(256), tokens)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        pending = start_checksum(shard, blocks, tokens)
        end.record()
        assert pending.result() == found
        times.append(start.elapsed_time(end))
    rate = 4096 * PROMPT.block_bytes / PROMPT.block_size / 1e6 / statistics.median(times)
    with capsys.disabled():
        print(f"\n{layout}: {rate:.0f} GB/s, {statistics.median(times):.3f} ms", end=" ")
    assert rate > 200
