"""What the parent and the two processes of a transfer bench say to each other. Plain values.

They are pickled, between processes of one program that started each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.bench.transfer_shapes import Shape
from kvxfer.cache.layout import CacheGeometry
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.regions import RegionSet


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """A cache to open: of each group its shape, reserved and committed blocks."""

    shapes: tuple[Shape, ...]
    capacity: tuple[int, ...]
    committed: tuple[int, ...]
    fixed: bool = False
    """One plain allocation (cudaMalloc) instead of memory that grows."""

    @classmethod
    def of(cls, *shapes: Shape, capacity: int, fixed: bool = False) -> CacheSetup:
        """All of it committed, as many blocks of each group."""
        blocks = (capacity,) * len(shapes)
        return cls(shapes, blocks, blocks, fixed)


@dataclass(frozen=True, slots=True)
class Contact:
    """An end, as its peer needs to know it."""

    base_address: int
    geometry: CacheGeometry
    regions: RegionSet
    description: bytes
    invitation: bytes
    directions: frozenset[Direction]


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of a group of the source that go to blocks of a group of the target."""

    direction: Direction
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    src_group: int = 0
    dst_group: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan as it was made: how much it moves, and how long it took to make."""

    total_bytes: int
    seconds: float


OTHER = {"source": "target", "target": "source"}
"""The end at the other side of each."""
