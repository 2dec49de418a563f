"""The blocks of all groups of a cache, allocated together or not at all.

Not thread-safe, like the allocators in it: the control thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from kvxfer.cache.blocks import BlockAllocator, BlockCounts
from kvxfer.errors import CacheError, NoFreeBlocks

Blocks = Sequence[Sequence[int]]
"""Block ids, group by group."""
Counts = Sequence[int]
"""Numbers of blocks, group by group."""


class BlockPools:
    """One BlockAllocator for each group. An `allocate` or `lower` that raises has changed nothing.
    What is given back is what one `allocate` gave out, or blocks of it: anything else is a bug of
    ours, and may be found when earlier groups have changed."""

    def __init__(self, num_groups: int) -> None:
        """Only null blocks, until `grow`."""
        self.groups = [BlockAllocator(1) for _ in range(num_groups)]

    @property
    def num_blocks(self) -> list[int]:
        """The bounds: ids below them exist, the null blocks among them."""
        return [group.num_blocks for group in self.groups]

    def counts(self) -> BlockCounts:
        """The sums over all groups."""
        found = [group.counts() for group in self.groups]
        return BlockCounts(*(sum(getattr(c, f.name) for c in found) for f in fields(BlockCounts)))

    def grow(self, num_blocks: Counts) -> None:
        for group, bound in zip(self.groups, num_blocks, strict=True):
            group.grow(max(bound, group.num_blocks))

    def missing(self, num_blocks: Counts) -> list[int]:
        """How many blocks of each group are lacking for `allocate(num_blocks)` to succeed."""
        pairs = zip(self.groups, num_blocks, strict=True)
        return [max(0, wanted - group.num_free) for group, wanted in pairs]

    def can_allocate(self, num_blocks: Counts) -> bool:
        return not any(self.missing(num_blocks))

    def allocate(self, num_blocks: Counts) -> list[list[int]]:
        """The lowest free blocks of each group. Raises NoFreeBlocks when one group lacks any."""
        if min(num_blocks) < 0:
            raise CacheError(f"cannot allocate {list(num_blocks)} blocks")
        if not self.can_allocate(num_blocks):
            free = [group.num_free for group in self.groups]
            raise NoFreeBlocks(f"asked for {list(num_blocks)} blocks, {free} are free")
        return [group.allocate(n) for group, n in zip(self.groups, num_blocks, strict=True)]

    def share(self, blocks: Blocks) -> None:
        for group, ids in zip(self.groups, blocks, strict=True):
            group.share(ids)

    def free(self, blocks: Blocks) -> None:
        for group, ids in zip(self.groups, blocks, strict=True):
            group.free(ids)

    def check_exclusive(self, blocks: Blocks) -> None:
        """Raise CacheError unless each of `blocks` is held once, and neither cached nor in
        quarantine: only such may be written to."""
        for group, ids in zip(self.groups, blocks, strict=True):
            group.check_exclusive(ids)

    def quarantine(self, blocks: Blocks) -> None:
        for group, ids in zip(self.groups, blocks, strict=True):
            group.quarantine(ids)

    def release_quarantined(self, blocks: Blocks) -> None:
        for group, ids in zip(self.groups, blocks, strict=True):
            group.release_quarantined(ids)

    def withhold(self, limits: Counts) -> None:
        for group, limit in zip(self.groups, limits, strict=True):
            group.withhold(limit)

    def check_unused(self, num_blocks: Counts) -> None:
        """Raise BlocksInUse while a block at or above its group's bound is used or quarantined."""
        for group, bound in zip(self.groups, num_blocks, strict=True):
            group.check_unused(bound)

    def bounds_in_use(self) -> list[int]:
        """The lowest bounds that `lower` would take now."""
        return [group.bound_in_use for group in self.groups]

    def lower(self, num_blocks: Counts) -> None:
        """Lower the bounds. Raises BlocksInUse as `check_unused`."""
        self.check_unused(num_blocks)
        pairs = list(zip(self.groups, num_blocks, strict=True))
        if not all(0 < bound <= group.num_blocks for group, bound in pairs):
            raise CacheError(f"the bounds {self.num_blocks} are not lowered to {list(num_blocks)}")
        for group, bound in pairs:
            group.lower(bound)

    def check_conservation(self) -> None:
        for group in self.groups:
            group.check_conservation()


def reaches(blocks: Blocks, bounds: Counts) -> bool:
    """Whether any of `blocks` lies at or above its group's bound."""
    return any(max(ids, default=-1) >= n for ids, n in zip(blocks, bounds, strict=True))
