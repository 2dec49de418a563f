"""Caches whose blocks come to runs of a wanted size, and the blocks that move. Pure.

All are shards of one model: 32 layers, 8 KV heads of 128 + 128 bf16 elements, blocks of 16 tokens.
Heads are divided by tensor parallelism, so a shard has 1, 2, 4 or 8. Between equal layouts and
blocks at random places a run is a page where layers are outermost, a block where blocks are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import UsageError

MIB, GIB = 1 << 20, 1 << 30
LAYERS = 32
HEAD_DIM = 128

_SHARDS = {
    4: (KVCacheLayout.LBHNC, 1, 8),
    8: (KVCacheLayout.LBHNC, 1, 16),
    16: (KVCacheLayout.LBHNC, 2, 16),
    32: (KVCacheLayout.LBHNC, 4, 16),
    64: (KVCacheLayout.LBHNC, 8, 16),
    256: (KVCacheLayout.BLHNC, 1, 16),
    512: (KVCacheLayout.BLHNC, 2, 16),
    1024: (KVCacheLayout.BLHNC, 4, 16),
    2048: (KVCacheLayout.BLHNC, 8, 16),
}
"""KiB of a run: layout, heads, tokens of a block."""
RUN_KIB = tuple(_SHARDS)


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of layers, and how they lie."""

    spec: KVCacheSpec
    layout: KVCacheLayout


def spec_of(num_kv_heads: int = 8, block_size: int = 16) -> KVCacheSpec:
    """A shard of the model."""
    return KVCacheSpec(LAYERS, num_kv_heads, HEAD_DIM, HEAD_DIM, "bfloat16", block_size)


def shape_of(run_kib: int) -> Shape:
    """The shard with runs of `run_kib` KiB. Raises UsageError where there is none."""
    if run_kib not in _SHARDS:
        raise UsageError("sizes", run_kib, f"must be one of {', '.join(map(str, RUN_KIB))} KiB")
    layout, heads, block_size = _SHARDS[run_kib]
    return Shape(spec_of(heads, block_size), layout)


def size_name(run_kib: int) -> str:
    """As people write it: 64KiB, 1MiB."""
    return f"{run_kib}KiB" if run_kib < 1024 else f"{run_kib // 1024}MiB"


def blocks_for(spec: KVCacheSpec, size_bytes: int) -> int:
    """Blocks that hold about `size_bytes`, one at least."""
    return max(1, size_bytes // spec.block_bytes)


def capacity_for(num_blocks: int) -> int:
    """Twice as many as move, the null block among them: places are neighbours by chance only, and
    segments end where large chunks do."""
    return 2 * num_blocks


def random_places(num_blocks: int, within: range, seed: int) -> tuple[int, ...]:
    """Distinct block ids in no order."""
    return tuple(random.Random(seed).sample(within, num_blocks))
