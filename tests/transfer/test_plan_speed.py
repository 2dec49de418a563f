"""What planning costs: 100,000 descriptors in 10 ms, and no descriptor where none is asked for.

A prompt of 4,096 tokens, 32 layers, 8 heads of 128 and 128 elements of bfloat16, blocks of 16
tokens at random places of 4 GiB, in chunks of 64 MiB. Times are this thread's own, of the best of a
few tries, since the machine is shared. Measured: 2 to 4 ms for 65,536 to 131,072 descriptors.
"""

import time

import numpy as np
import pytest

from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.reach import check_plan
from kvxfer.transfer.regions import Region, RegionSet

MIB = 1 << 20
TRIES = 12


def side(layout, num_heads=8, block_size=16, first_head=0, seed=0):
    spec = KVCacheSpec(32, num_heads, 128, 128, "bfloat16", block_size)
    capacity = 4096 * MIB // spec.block_bytes
    geometry = GroupGeometry.build(spec, KVCacheLayout(layout), capacity, 2 * MIB)
    regions = []
    for segment in range(geometry.num_segments):
        start = geometry.segment_offset(segment)
        end = start + geometry.segment_stride_bytes
        regions += [Region(at, min(64 * MIB, end - at)) for at in range(start, end, 64 * MIB)]
    rng = np.random.default_rng([num_heads, block_size, seed])
    blocks = 1 + rng.permutation(capacity - 1)[: 4096 // block_size]
    return CacheSide(geometry, RegionSet(tuple(regions)), blocks.tolist(), 0, first_head)


def best_of(function, enough_s):
    """Seconds that this thread computed in the quickest of a few calls, or in the first below
    `enough_s`."""
    took = []
    while len(took) < TRIES and min(took, default=enough_s) >= enough_s:
        started = time.thread_time()
        function()
        took.append(time.thread_time() - started)
    return min(took)


@pytest.mark.parametrize(
    ("src", "dst", "runs", "size"),
    [
        (side("LBNHC"), side("LBNHC", 4, first_head=4), 131_072, 2048),
        (side("LBNHC", 4, first_head=4), side("LBNHC"), 131_072, 2048),
        (side("LBHNC"), side("LBHNC", block_size=64), 65_536, 8192),
        (side("BLHNC", block_size=64), side("BLHNC"), 65_536, 8192),
        (side("LHBNC"), side("LHBNC", seed=1), 65_536, 8192),
        (side("BLHNC"), side("BLNHC", seed=1), 1_048_576, 512),
        (side("LHBNC"), side("BLNHC", 4, 64, first_head=4), 524_288, 512),
    ],
    ids=["TP1-2", "TP2-1", "16-64", "64-16", "segments", "relayout", "all"],
)
def test_a_hundred_thousand_descriptors_take_at_most_ten_milliseconds(src, dst, runs, size):
    plan = plan_transfer(src, dst, range(4096))
    assert plan.total_bytes == runs * size
    assert 0.98 * runs <= plan.num_runs <= runs  # neighbours at random places make a few one
    bar = 0.010 * max(1, runs / 100_000)
    assert best_of(lambda: plan_transfer(src, dst, range(4096)).runs, bar) < bar


def test_a_plan_of_a_million_runs_is_made_and_checked_without_them():
    """Measured 1.5 ms each; making the runs takes 25."""
    src, dst = side("LBHNC"), side("LBNHC", seed=1)
    plan = plan_transfer(src, dst, range(4096))

    def both():
        made = plan_transfer(src, dst, range(4096))
        check_plan(made, Direction.PUSH, src.regions, dst.regions)

    assert best_of(both, 0.010) < 0.010
    check_plan(plan, Direction.PUSH, src.regions, dst.regions)
    assert "runs" not in vars(plan), "no descriptor was made"
    assert plan.num_runs > 1_000_000
