"""Registered ranges of one cache, as its owner and its peers see them. Immutable.

Region: a committed range that a connector registered, never larger than a chunk. Offsets are
relative to the base of the cache. No descriptor may cross the edge of a region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvxfer.cache.layout import GroupGeometry
from kvxfer.errors import RegionError
from kvxfer.transfer.whole_blocks import WholeBlocks

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Bytes [offset, offset + size) of a cache."""

    offset: int
    size: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size <= 0:
            raise RegionError(f"region [{self.offset}, +{self.size}) is empty or negative")

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class RegionSet:
    """Disjoint regions, sorted by offset, at one generation (the count of additions)."""

    regions: tuple[Region, ...] = ()
    generation: int = 0

    def __post_init__(self) -> None:
        for left, right in zip(self.regions, self.regions[1:], strict=False):
            if left.end > right.offset:
                raise RegionError(f"regions {left} and {right} overlap or are not sorted")

    def add(self, regions: Iterable[Region]) -> RegionSet:
        """A new set with `regions` too, one generation on. Raises RegionError on an overlap."""
        return RegionSet(tuple(sorted((*self.regions, *regions))), self.generation + 1)

    def remove(self, regions: Iterable[Region]) -> RegionSet:
        """A new set without `regions`, of the same generation. Raises RegionError for one that is
        not in it just so."""
        gone = set(regions)
        unknown = sorted(gone.difference(self.regions))
        if unknown:
            raise RegionError(f"{unknown[0]} is not registered ({len(unknown)} such)")
        return RegionSet(tuple(r for r in self.regions if r not in gone), self.generation)

    @property
    def total_bytes(self) -> int:
        return sum(region.size for region in self.regions)

    @cached_property
    def starts(self) -> Int64Array:
        return np.array([region.offset for region in self.regions], dtype=np.int64)

    @cached_property
    def ends(self) -> Int64Array:
        return np.array([region.end for region in self.regions], dtype=np.int64)

    @cached_property
    def bounds(self) -> tuple[list[int], list[int]]:
        """Starts and ends, for looking up one at a time."""
        return self.starts.tolist(), self.ends.tolist()

    def whole_blocks(self, geometry: GroupGeometry) -> WholeBlocks:
        """Of a group of the cache whose regions these are."""
        found = self._whole_blocks.get(geometry)
        if found is None:
            found = self._whole_blocks[geometry] = WholeBlocks(geometry, self.starts, self.ends)
        return found

    @cached_property
    def _whole_blocks(self) -> dict[GroupGeometry, WholeBlocks]:
        return {}

    def includes(self, other: RegionSet) -> bool:
        """Whether each region of `other` is one of these."""
        index = np.searchsorted(self.starts, other.starts)
        if not len(index):
            return True
        if index[-1] >= len(self.starts):
            return False
        same = (self.starts[index] == other.starts) & (self.ends[index] == other.ends)
        return bool(same.all())

    def check_covers(self, offsets: Int64Array, sizes: Int64Array, what: str) -> None:
        """Raise RegionError unless each [offset, offset + size) lies within one region."""
        if not len(offsets):
            return
        index = np.searchsorted(self.starts, offsets, side="right") - 1
        inside = index >= 0
        if len(self.regions):
            # A difference, not a sum: a huge offset would wrap round and look small.
            inside &= sizes <= self.ends[index] - offsets
        if not inside.all():
            first = int(np.argmin(inside))
            raise RegionError(
                f"{what}: bytes [{offsets[first]}, +{sizes[first]}) lie in no registered region "
                f"({len(self.regions)} regions, generation {self.generation})"
            )
