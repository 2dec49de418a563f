"""What moves, in its shortest form: nests of equal runs at regular distances from listed starts.

A prompt of 4,096 tokens is one box of 256 starts, however small the runs are that two layouts have
in common: kernels copy boxes, descriptors are made of them only where a transport needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import PlanError
from kvxfer.transfer.regions import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """The bytes of one side: for each start and each index within `extents` a stretch of
    `size_bytes`, which may be longer than the runs that the other side allows.

    `strides` descend, none below 0. Stretches may repeat, and overlap where a box was made so.
    """

    starts: Int64Array
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int

    @classmethod
    def build(
        cls, starts: Int64Array, extents: tuple[int, ...], strides: tuple[int, ...], run_bytes: int
    ) -> Stretches:
        """Runs of `run_bytes`, the neighbours among them joined; each stride may have either sign.
        A stride of 0, the same bytes again, is kept: what it means is the caller's to judge."""
        axes = sorted(zip(strides, extents, strict=True), key=lambda axis: -abs(axis[0]))
        axes = [(stride, extent) for stride, extent in axes if extent > 1]
        back = sum(stride * (extent - 1) for stride, extent in axes if stride < 0)
        while axes and abs(axes[-1][0]) == run_bytes:
            run_bytes *= axes.pop()[1]
        return cls(
            starts + back if back else starts,
            tuple(extent for _, extent in axes),
            tuple(abs(stride) for stride, _ in axes),
            run_bytes,
        )

    def ascending(self) -> tuple[Int64Array, int]:
        """The starts in order, with the axes outside all of them taken apart, and how many those
        are: where they are segments, no region reaches from one to the next."""
        offsets = self.starts
        if not len(offsets):
            return offsets, 0
        if (offsets[1:] < offsets[:-1]).any():
            offsets = np.sort(offsets, kind="stable")
        reach = int(offsets[-1] - offsets[0])
        outer = sum(stride > reach > 0 for stride in self.strides)
        return around(offsets, self.extents[:outer], self.strides[:outer]), outer

    def span_bytes(self, level: int = 0) -> int:
        """From the first byte to the last, of what the axes from `level` on hold together."""
        axes = zip(self.extents[level:], self.strides[level:], strict=True)
        return self.size_bytes + sum((extent - 1) * stride for extent, stride in axes)


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """For each start e and each index (i, j, …) within `extents`: `run_bytes` bytes from
    src_starts[e] + i × src_strides[0] + j × src_strides[1] + … to the same sum for the destination.

    Offsets are bytes, relative to the base of each side's cache. `extents` may be empty: one run a
    start. Destination bytes never come twice; sources may. A start may lie anywhere in a block:
    where one side's blocks are larger, the smaller one's entries start inside them.

    Raises PlanError where the columns do not fit each other.
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

    def __post_init__(self) -> None:
        for name, starts in (("src_starts", self.src_starts), ("dst_starts", self.dst_starts)):
            if starts.dtype != np.int64 or starts.shape != (len(self.src_starts),):
                raise PlanError(f"box: {name} are {starts.dtype} {starts.shape}, not int64 [E]")
        if not len(self.extents) == len(self.src_strides) == len(self.dst_strides):
            raise PlanError(f"box: {self.extents} need as many strides on each side")
        if any(extent < 1 for extent in self.extents):
            raise PlanError(f"box: extents {self.extents} must be positive")

    @property
    def num_runs(self) -> int:
        return len(self.dst_starts) * math.prod(self.extents)

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    def src_offsets(self) -> Int64Array:
        """[num_runs]; the order is that of `dst_offsets`: starts outermost."""
        return spread(self.src_starts, self.extents, self.src_strides)

    def dst_offsets(self) -> Int64Array:
        return spread(self.dst_starts, self.extents, self.dst_strides)

    def src_stretches(self) -> Stretches:
        """What is read, as long as the source by itself allows."""
        return Stretches.build(self.src_starts, self.extents, self.src_strides, self.run_bytes)

    def dst_stretches(self) -> Stretches:
        """What is written, as long as the destination by itself allows."""
        return Stretches.build(self.dst_starts, self.extents, self.dst_strides, self.run_bytes)


def spread(starts: Int64Array, extents: tuple[int, ...], strides: tuple[int, ...]) -> Int64Array:
    """Each start plus each sum of index × stride, starts outermost."""
    found = starts
    for extent, stride in zip(extents, strides, strict=True):
        found = np.add.outer(found, np.arange(extent, dtype=np.int64) * stride).ravel()
    return found


def around(offsets: Int64Array, extents: tuple[int, ...], strides: tuple[int, ...]) -> Int64Array:
    """The same sums, the axes outermost."""
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        offsets = np.add.outer(np.arange(extent, dtype=np.int64) * stride, offsets).ravel()
    return offsets
