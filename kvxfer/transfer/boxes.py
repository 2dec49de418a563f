"""What moves, in its shortest form: nests of equal runs at regular distances from listed starts.

A prompt of 4,096 tokens is one box of 256 starts, however small the runs are that two layouts have
in common: kernels copy boxes, descriptors are made of them only where a transport needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvxfer.transfer.regions import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """For each start e and each index (i, j, …) within `extents`: `run_bytes` bytes from
    src_starts[e] + i × src_strides[0] + j × src_strides[1] + … to the same sum for the destination.

    Offsets are bytes, relative to the base of each side's cache. `extents` may be empty: one run a
    start. Destination bytes never come twice; sources may.
    """

    src_starts: Int64Array
    """[E]"""
    dst_starts: Int64Array
    """[E], ascending."""
    extents: tuple[int, ...]
    """In the order of destination strides, the largest first; each at least 2."""
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    run_bytes: int

    @property
    def num_runs(self) -> int:
        return len(self.dst_starts) * math.prod(self.extents)

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    def src_offsets(self) -> Int64Array:
        """[num_runs]; the order is that of `dst_offsets`: starts outermost."""
        return _spread(self.src_starts, self.extents, self.src_strides)

    def dst_offsets(self) -> Int64Array:
        return _spread(self.dst_starts, self.extents, self.dst_strides)


def _spread(starts: Int64Array, extents: tuple[int, ...], strides: tuple[int, ...]) -> Int64Array:
    found = starts
    for extent, stride in zip(extents, strides, strict=True):
        found = np.add.outer(found, np.arange(extent, dtype=np.int64) * stride).ravel()
    return found
