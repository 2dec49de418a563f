"""Which blocks of a group lie well inside the registered regions, worked out once for each set of
regions: a plan of such blocks alone needs no look at regions. Pure.

Fact relied on: what a hand-over moves of a block lies within its slab of each segment, so that a
slab inside a region, which ends at neither end of it, is registered and crosses no edge; nor do
two of them together, however they adjoin.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from kvxfer.cache.layout import GroupGeometry

Int64Array = NDArray[np.int64]

MAX_STRETCHES = 1 << 20
"""Of regions in segments: a peer may tell of more than any cache has, and is planned for all the
same, the long way."""


class WholeBlocks:
    """Of one group of a cache; rows of neighbouring blocks whose slabs all lie inside regions."""

    def __init__(self, geometry: GroupGeometry, starts: Int64Array, ends: Int64Array) -> None:
        """`starts` and `ends` of disjoint regions, sorted, relative to the cache's base."""
        firsts, ends = _rows(geometry, starts - geometry.offset, ends - geometry.offset)
        self._firsts: list[int] = firsts.tolist()
        self._ends: list[int] = ends.tolist()

    def has(self, lowest: int, highest: int) -> bool:
        """Whether the blocks from `lowest` to `highest` are all in one row."""
        row = bisect_right(self._firsts, lowest) - 1
        return row >= 0 and highest < self._ends[row]


def _rows(
    geometry: GroupGeometry, starts: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Half-open, ascending: the blocks that are inside a region in as many segments as there are.
    A block is inside one region of a segment at the most."""
    none = np.zeros(0, dtype=np.int64)
    stride, slab = geometry.segment_stride_bytes, geometry.segment_block_bytes
    first_segment = np.maximum(starts, 0) // stride
    num_segments = np.maximum(0, np.minimum(-(-ends // stride), geometry.num_segments))
    num_segments = np.maximum(0, num_segments - first_segment)
    total = int(num_segments.sum())
    if not 0 < total <= MAX_STRETCHES:
        return none, none
    parent = np.repeat(np.arange(len(starts)), num_segments)
    rank = np.arange(total) - np.repeat(np.cumsum(num_segments) - num_segments, num_segments)
    base = (first_segment[parent] + rank) * stride
    low = np.maximum((starts[parent] - base) // slab + 1, 0)
    high = np.minimum((ends[parent] - base - 1) // slab, geometry.capacity_blocks)
    some = low < high
    bounds = np.concatenate([low[some], high[some]])
    steps = np.concatenate([np.ones(some.sum()), -np.ones(some.sum())]).astype(np.int64)
    at, index = np.unique(bounds, return_inverse=True)
    depth = np.zeros(len(at), dtype=np.int64)
    np.add.at(depth, index, steps)
    is_whole = np.cumsum(depth) == geometry.num_segments
    turns = np.flatnonzero(np.diff(is_whole, prepend=False))
    return at[turns[0::2]], at[turns[1::2]]
