"""Who owns which block of a cache: the allocator, its counts and its conservation law.

Not thread-safe, by design: the control thread owns it, and no other thread ever asks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.cache.cached_blocks import CachedBlocks
from kvxfer.errors import BlocksInUse, CacheError, NoFreeBlocks

NULL_BLOCK = 0
"""Committed, never granted: padding writes go there."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; at any time free + used + quarantined + cached + null == total."""

    free: int
    """Held by nobody, withheld or not, and nothing is lost when they are granted."""
    used: int
    """Held by at least one caller, in quarantine as well or not."""
    quarantined: int
    """Held by the quarantine alone."""
    cached: int
    """Held by nobody, kept for what is in them, and granted when no other is free."""
    null: int
    total: int


class BlockAllocator:
    """Grants blocks [1, num_blocks), lowest id first, so that a cache fills from the bottom up;
    when none is free, those cached, the one that was given back first.

    A caller holds references: one a block from `allocate`, one more from each `share`. `free` gives
    them back; `quarantine` gives them to the quarantine, for blocks that a peer may still touch
    after their request has ended. A block is free again when nobody holds a reference.

    Every mutation is all-or-nothing: one that raises has changed nothing. Naming a block twice in
    one call counts twice.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CacheError(f"a cache of {num_blocks} blocks has no room for the null block")
        self._num_blocks = num_blocks
        self._free = list(range(NULL_BLOCK + 1, num_blocks))  # ascending, so it is a heap
        self._withheld: list[int] = []
        self._limit = num_blocks
        self._held: Counter[int] = Counter()
        self._quarantined: Counter[int] = Counter()
        self._cached = CachedBlocks()

    @property
    def num_blocks(self) -> int:
        """The bound: ids below it exist, the null block among them."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that may be granted, cached ones among them."""
        return len(self._free) + self._cached.num_idle

    def num_used_of(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` some caller holds."""
        return sum(block in self._held for block in blocks)

    def counts(self) -> BlockCounts:
        return BlockCounts(
            free=len(self._free) + len(self._withheld),
            used=len(self._held),
            quarantined=len(self._quarantined.keys() - self._held.keys()),
            cached=self._cached.num_idle,
            null=1,
            total=self._num_blocks,
        )

    def grow(self, num_blocks: int) -> None:
        """Raise the bound to `num_blocks`, of which every byte is committed by now."""
        if num_blocks < self._num_blocks:
            raise CacheError(f"the bound is {self._num_blocks} blocks, not lowered to {num_blocks}")
        # Larger than all that are in it, and ascending: the list stays a heap.
        self._free.extend(range(self._num_blocks, num_blocks))
        self._num_blocks = num_blocks
        self.withhold(num_blocks)

    def withhold(self, limit: int) -> None:
        """Grant only blocks below `limit` from now on; it ends with a limit of `num_blocks`. What
        was cached from there on is not found any more."""
        free = sorted(self._free + self._withheld + self._cached.forget_from(limit))
        self._limit = limit
        self._free = [block for block in free if block < limit]
        self._withheld = [block for block in free if block >= limit]

    @property
    def bound_in_use(self) -> int:
        """One more than the highest block that is used or quarantined, or null."""
        return 1 + max((NULL_BLOCK, *self._held, *self._quarantined))

    def check_unused(self, num_blocks: int) -> None:
        """Raise BlocksInUse while a block at or above `num_blocks` is used or quarantined."""
        used = {block for block in self._held if block >= num_blocks}
        quarantined = {block for block in self._quarantined if block >= num_blocks} - used
        if used or quarantined:
            highest = max(used | quarantined)
            raise BlocksInUse(num_blocks, len(used), len(quarantined), highest)

    def lower(self, num_blocks: int) -> None:
        """Lower the bound to `num_blocks`: the ids from there on exist no more.

        Raises BlocksInUse while one of them is used or quarantined.
        """
        if not NULL_BLOCK < num_blocks <= self._num_blocks:
            raise CacheError(f"the bound is {self._num_blocks} blocks, not raised to {num_blocks}")
        self.check_unused(num_blocks)
        self.withhold(num_blocks)
        self._withheld = []
        self._num_blocks = num_blocks

    def can_allocate(self, n: int) -> bool:
        return 0 <= n <= self.num_free

    def allocate(self, n: int) -> list[int]:
        """The `n` lowest free blocks, ascending, one reference each; the oldest cached ones are
        evicted where those are too few. Raises NoFreeBlocks."""
        if n < 0:
            raise CacheError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise NoFreeBlocks(f"asked for {n} blocks, {self.num_free} are free")
        for _ in range(n - len(self._free)):
            heapq.heappush(self._free, self._cached.evict())
        blocks = [heapq.heappop(self._free) for _ in range(n)]
        self._held.update(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are cached, or some caller holds them."""
        wanted = Counter(blocks)
        for block in wanted:
            if block not in self._held and not self._cached.is_idle(block):
                raise CacheError(f"block {block} is held by no caller and cannot be shared")
        for block in wanted:
            self._cached.wake(block)
        self._held.update(wanted)

    def cache(self, block: int, key: bytes) -> None:
        """Have `find_first` know `block`, which a caller holds, by `key`, and keep its content once
        it is given back, until it is evicted. Nobody writes to it any more. Not where another block
        is known by `key`, nor for a block that is withheld, or in quarantine too."""
        _check_holds(self._held, {block: 1}, "cached")
        if block < self._limit and block not in self._quarantined:
            self._cached.add(block, key)

    def find_first(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks with these contents, for `share`, up to the first key that none has."""
        return self._cached.find_first(keys)

    def free(self, blocks: Iterable[int]) -> None:
        """Give back one reference to each of `blocks`. Of cached ones the last is evicted first: a
        prefix is of use without what follows it, and not the other way round."""
        self._take(self._held, Counter(blocks), "freed")

    def check_exclusive(self, blocks: Iterable[int]) -> None:
        """Raise CacheError unless each of `blocks` may be written to: one reference, and nobody can
        come to share it."""
        for block in blocks:
            references = self._held.get(block, 0)
            if references != 1 or block in self._quarantined or block in self._cached:
                raise CacheError(
                    f"block {block} is no single caller's to write to: {references} references, "
                    f"cached: {block in self._cached}, quarantined: {block in self._quarantined}"
                )

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Move the caller's reference to each of `blocks` into the quarantine.

        A block that another caller shares stays in that caller's use, and becomes free only when
        it was freed there and released here. A peer may write to it: it is cached no more.
        """
        wanted = Counter(blocks)
        _check_holds(self._held, wanted, "quarantined")
        self._quarantined.update(wanted)
        for block in wanted:
            self._cached.forget(block)
        self._take(self._held, wanted, "quarantined")

    def release_quarantined(self, blocks: Iterable[int]) -> None:
        """End one quarantine of each of `blocks`: no peer touches them for it any more."""
        self._take(self._quarantined, Counter(blocks), "released from quarantine")

    def check_conservation(self) -> None:
        """Raise CacheError unless every block is in exactly one state; a bug of ours if not."""
        counts = self.counts()
        found = counts.free + counts.used + counts.quarantined + counts.cached + counts.null
        if found != counts.total:
            raise CacheError(f"{found} blocks are accounted for, not {counts.total}: {counts}")
        free = {*self._free, *self._withheld, *self._cached.idle}
        owned = free | self._held.keys() | self._quarantined.keys() | {NULL_BLOCK}
        if owned != set(range(self._num_blocks)):
            # The sum is right all the same, so some block was counted twice.
            astray = sorted(owned ^ set(range(self._num_blocks)))
            raise CacheError(f"blocks {astray} are in no state, others in two: {counts}")
        lost = self._cached.blocks - self._held.keys() - {*self._cached.idle}
        if lost:
            raise CacheError(f"blocks {sorted(lost)} are cached, and neither held nor kept")

    def _take(self, owner: Counter[int], wanted: Counter[int], verb: str) -> None:
        """Remove references from `owner`; blocks that nobody holds any more become free."""
        _check_holds(owner, wanted, verb)
        for block, references in reversed(wanted.items()):
            owner[block] -= references
            if not owner[block]:
                del owner[block]
            if block not in self._held and block not in self._quarantined:
                if block in self._cached:
                    self._cached.rest(block)
                elif block < self._limit:
                    heapq.heappush(self._free, block)
                else:
                    self._withheld.append(block)


def _check_holds(owner: Mapping[int, int], wanted: Mapping[int, int], verb: str) -> None:
    for block, references in wanted.items():
        if owner.get(block, 0) < references:
            raise CacheError(
                f"block {block} cannot be {verb}: {owner.get(block, 0)} references are there, "
                f"{references} were named"
            )
