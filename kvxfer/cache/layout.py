"""The six cache layouts, and where every byte of a cache lies. Pure: no torch.

A layout is a permutation of the logical axes [L, B, H, N, C] (layer, block, KV head, token in
block, content), outermost first. The axes outside B number the **segments**: stretches of
addresses that grow by appending blocks. Segments are padded to the granularity, so that no two of
them share a granule, and strides are computed for the capacity: growth never moves a byte.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import PlanError, UsageError

AXES = "LBHNC"

MAX_ADDRESSES = 1 << 47
"""What a process can address on x86-64 and AArch64, and far below what overflows int64."""
MAX_GROUPS = 64
"""More than any model has; a peer's word is bounded by it."""


class KVCacheLayout(enum.StrEnum):
    """vLLM's six names; the default is LBHNC."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @classmethod
    def parse(cls, field: str, name: str) -> KVCacheLayout:
        """The layout called `name`; `field` names the option in the error."""
        try:
            return cls(name.upper())
        except ValueError:
            raise UsageError(field, name, f"must be one of {', '.join(cls)}") from None

    @property
    def segment_axes(self) -> str:
        """The axes outside B, outermost first: '' where B is outermost."""
        return self.value[: self.value.index("B")]

    @property
    def inner_axes(self) -> str:
        """The axes inside B: what one block of one segment holds, outermost first."""
        return self.value[self.value.index("B") + 1 :]

    @property
    def is_layer_compact(self) -> bool:
        """One layer's KV is one stretch (L outermost)."""
        return self.value[0] == "L"

    @property
    def is_page_hnc(self) -> bool:
        """A page reads [H, N, C] in order."""
        return [a for a in self.value if a in "HNC"] == list("HNC")

    @property
    def is_block_compact(self) -> bool:
        """A page is one stretch ({L, B} are the two outermost axes)."""
        return set(self.value[:2]) == {"L", "B"}

    @property
    def is_block_outermost(self) -> bool:
        """A block is one stretch over all layers (B outermost): a single segment."""
        return self.value[0] == "B"


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Where each byte of one group of `capacity_blocks` blocks lies, relative to the cache's base.

    The byte of element (l, b, h, n, c) starts at `offset` plus the sum of index × stride.
    """

    spec: KVCacheSpec
    layout: KVCacheLayout
    capacity_blocks: int
    granularity: int
    strides: tuple[int, int, int, int, int]
    """Bytes between neighbours along L, B, H, N, C."""
    offset: int = 0
    """Where the group's first segment starts in the reservation."""

    def __post_init__(self) -> None:
        _check_sizes(self.capacity_blocks, self.granularity)
        expected = _strides(self.spec, self.layout, self.segment_stride_bytes)
        if self.strides != expected:
            raise PlanError(f"geometry: strides {self.strides} are not {expected}")
        if self.offset < 0 or self.offset % self.granularity:
            raise PlanError(f"geometry: offset {self.offset} is no multiple of the granularity")
        if self.total_bytes > MAX_ADDRESSES:
            raise UsageError(
                "capacity_blocks", self.capacity_blocks, f"needs {self.total_bytes} addresses"
            )

    @classmethod
    def build(
        cls,
        spec: KVCacheSpec,
        layout: KVCacheLayout,
        capacity_blocks: int,
        granularity: int,
        offset: int = 0,
    ) -> GroupGeometry:
        _check_sizes(capacity_blocks, granularity)
        segment = _round_up(capacity_blocks * _slab_bytes(spec, layout), granularity)
        strides = _strides(spec, layout, segment)
        return cls(spec, layout, capacity_blocks, granularity, strides, offset)

    @property
    def num_segments(self) -> int:
        return math.prod(_extent(self.spec, axis) for axis in self.layout.segment_axes)

    @property
    def segment_block_bytes(self) -> int:
        """What one block occupies in one segment: the B stride."""
        return _slab_bytes(self.spec, self.layout)

    @property
    def segment_stride_bytes(self) -> int:
        """Distance between the starts of two segments: capacity, padded to the granularity."""
        return _round_up(self.capacity_blocks * self.segment_block_bytes, self.granularity)

    @property
    def total_bytes(self) -> int:
        """Addresses that the group takes of the reservation."""
        return self.num_segments * self.segment_stride_bytes

    @property
    def end(self) -> int:
        return self.offset + self.total_bytes

    def committed_bytes_per_segment(self, num_blocks: int) -> int:
        """Whole granules that back the first `num_blocks` blocks of a segment."""
        return _round_up(num_blocks * self.segment_block_bytes, self.granularity)

    def blocks_backed_by(self, bytes_per_segment: int) -> int:
        """Blocks of which every byte lies in the first `bytes_per_segment` of each segment."""
        return min(self.capacity_blocks, bytes_per_segment // self.segment_block_bytes)

    def segment_offset(self, segment: int) -> int:
        return self.offset + segment * self.segment_stride_bytes

    def offset_in_segment(self, offset: int) -> int:
        """How far into its segment a byte of the group lies."""
        return (offset - self.offset) % self.segment_stride_bytes

    def lowest_block(self, start: int, end: int) -> int:
        """The first block that may have bytes in [start, end), which overlaps the group."""
        stride = self.segment_stride_bytes
        start, end = max(start, self.offset) - self.offset, min(end, self.end) - self.offset
        if start // stride != (end - 1) // stride:
            return 0  # it reaches into a segment's beginning
        return start % stride // self.segment_block_bytes


@dataclass(frozen=True)
class CacheGeometry:
    """The groups of one cache, one behind the other in a single reservation.

    It travels in Hello: a receiver gets it checked again at birth, so that a peer whose arithmetic
    differs is refused.
    """

    groups: tuple[GroupGeometry, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise UsageError("groups", len(self.groups), f"must be 1 to {MAX_GROUPS}")
        end = 0
        for group in self.groups:
            if group.granularity != self.granularity or group.offset != end:
                raise PlanError(f"geometry: a group at {group.offset} does not follow {end}")
            end = group.end
        if end > MAX_ADDRESSES:
            raise UsageError("groups", len(self.groups), f"need {end} addresses")

    @classmethod
    def build(
        cls,
        specs: Sequence[KVCacheSpec],
        layouts: Sequence[KVCacheLayout],
        capacity_blocks: Sequence[int],
        granularity: int,
    ) -> CacheGeometry:
        """One group for each entry of the three lists."""
        groups: list[GroupGeometry] = []
        for spec, layout, capacity in zip(specs, layouts, capacity_blocks, strict=True):
            offset = groups[-1].end if groups else 0
            groups.append(GroupGeometry.build(spec, layout, capacity, granularity, offset))
        return cls(tuple(groups))

    @cached_property
    def specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(group.spec for group in self.groups)

    @property
    def granularity(self) -> int:
        return self.groups[0].granularity

    @property
    def num_layers(self) -> int:
        return sum(group.spec.num_layers for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """The size of the reservation."""
        return self.groups[-1].end

    def committed_bytes(self, num_blocks: Sequence[int]) -> int:
        """What has to be committed, in whole granules, for so many blocks of each group."""
        pairs = zip(self.groups, num_blocks, strict=True)
        return sum(g.num_segments * g.committed_bytes_per_segment(n) for g, n in pairs)

    def bytes_of(self, num_blocks: Sequence[int]) -> int:
        """What so many blocks of each group hold."""
        pairs = zip(self.groups, num_blocks, strict=True)
        return sum(group.spec.block_bytes * blocks for group, blocks in pairs)


def _check_sizes(capacity_blocks: int, granularity: int) -> None:
    if capacity_blocks < 1:
        raise UsageError("capacity_blocks", capacity_blocks, "must be at least 1")
    if granularity < 1 or granularity & (granularity - 1):
        raise UsageError("granularity", granularity, "must be a power of two")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _extent(spec: KVCacheSpec, axis: str) -> int:
    extents = {
        "L": spec.num_layers,
        "H": spec.num_kv_heads,
        "N": spec.block_size,
        "C": spec.content_dim,
    }
    return extents[axis]


def _slab_bytes(spec: KVCacheSpec, layout: KVCacheLayout) -> int:
    return spec.itemsize * math.prod(_extent(spec, axis) for axis in layout.inner_axes)


def _strides(
    spec: KVCacheSpec, layout: KVCacheLayout, segment_bytes: int
) -> tuple[int, int, int, int, int]:
    stride = spec.itemsize
    found = {}
    for axis in reversed(layout.inner_axes):
        found[axis] = stride
        stride *= _extent(spec, axis)
    found["B"] = stride
    stride = segment_bytes
    for axis in reversed(layout.segment_axes):
        found[axis] = stride
        stride *= _extent(spec, axis)
    return found["L"], found["B"], found["H"], found["N"], found["C"]
