"""Runs of a window as parcels that fit a slot each, and their bytes in and out of one buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from connectors.host_copy import copy_host
from kvxfer.errors import ConnectorError
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Int64Array, RegionSet
from kvxfer.transfer.runs import Runs, cut

MAX_RUNS: Final = 480
"""Of a parcel: offsets and sizes of so many fit a frame."""
FEW_RUNS: Final = 128
"""Are copied one by one. Measured by CPU time: 1 MiB as 16 runs in 106 µs (330 by `copy_host`, of
which 180 whatever it copies), 480 runs of 2 KiB in 930 (650)."""


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Stretches of one window, whose bytes follow each other in a parcel: int64, base-relative."""

    offsets: Int64Array
    sizes: Int64Array

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    def to_bytes(self) -> bytes:
        return np.stack([self.offsets, self.sizes]).astype("<i8").tobytes()

    @classmethod
    def from_peer(cls, data: bytes, regions: RegionSet, limit_bytes: int) -> Extents:
        """Raises TransferError unless they all lie in `regions` and fit a parcel."""
        if not data or len(data) % 16 or len(data) > 16 * MAX_RUNS:
            raise ConnectorError(f"extents of {len(data)} bytes")
        offsets, sizes = np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(2, -1)
        if sizes.min() < 1 or sizes.max() > limit_bytes or sizes.sum() > limit_bytes:
            raise ConnectorError(f"extents do not fit a parcel of {limit_bytes} bytes")
        regions.check_covers(offsets, sizes, "a peer's extents")
        return cls(offsets, sizes)

    def gather(self, base_address: int, into: memoryview) -> None:
        """Copy the bytes, one after the other, to the start of `into`."""
        places = np.cumsum(self.sizes) - self.sizes
        _copy(self.offsets, base_address, places, address_of(into), self.sizes)

    def scatter(self, parcel: memoryview, base_address: int) -> None:
        """The other way round."""
        places = np.cumsum(self.sizes) - self.sizes
        _copy(places, address_of(parcel), self.offsets, base_address, self.sizes)


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(
    src: Int64Array, src_base: int, dst: Int64Array, dst_base: int, sizes: Int64Array
) -> None:
    if len(sizes) > FEW_RUNS:
        copy_host(TransferPlan.of_runs(src, dst, sizes).boxes, src_base, dst_base)
        return
    columns = (src + src_base).tolist(), (dst + dst_base).tolist(), sizes.tolist()
    for origin, to, size in zip(*columns, strict=True):
        ctypes.memmove(to, origin, size)


def parcels_of(runs: Runs, limit_bytes: int) -> Iterator[tuple[Extents, Extents]]:
    """(source's, destination's) of each parcel, of at most `limit_bytes`."""
    ends = np.cumsum(runs.sizes)
    edges = np.arange(limit_bytes, int(ends[-1]), limit_bytes, dtype=np.int64)
    parent, start, sizes = cut(ends - runs.sizes, runs.sizes, edges)
    src, dst = runs.src_offsets[parent] + start, runs.dst_offsets[parent] + start
    parcel = (np.cumsum(sizes) - sizes) // limit_bytes
    firsts = np.flatnonzero(np.diff(parcel, prepend=-1))
    for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(sizes)], strict=True):
        for some in range(first, end, MAX_RUNS):
            part = slice(some, min(some + MAX_RUNS, end))
            yield Extents(src[part], sizes[part]), Extents(dst[part], sizes[part])
