"""One request to give memory of the cache back, or to pack it: what it wants and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvxfer.cache.kv_cache import KVCache
from kvxfer.control.cache_messages import CacheState
from kvxfer.errors import MemoryPinned
from kvxfer.transfer.regions import Region, RegionSet

Answer = Callable[[CacheState], None]

RENEW = "Renew"
"""A revocation of nothing, which a worker asks of itself: peers leave its agent for a new one."""


@dataclass
class CacheTask:
    """Control thread only, but for `release`."""

    request: str
    """Name of the message, Shrink, Sleep, WakeUp or Defragment; or RENEW."""
    answer: Answer
    """Called once."""
    num_blocks: list[int] = field(default_factory=list)
    """Shrink: blocks of each group that keep their memory; all others need the whole cache."""
    deadline_s: float = 0.0
    problem: str = ""
    """Why it is not done, or not all of it."""
    limits: list[int] = field(default_factory=list)
    """Blocks of each group that stay usable; empty before that is known."""
    regions: tuple[Region, ...] = ()
    """What is to be revoked."""

    def aim(self, cache: KVCache, usable_blocks: Sequence[int], registered: RegionSet) -> None:
        """Decide what goes, for `num_blocks` as it is now."""
        if self.request == RENEW:
            self.limits = list(usable_blocks)
        elif self.request == "Shrink":
            left = cache.blocks_after_shrink(self.num_blocks)
            self.limits = [min(*pair) for pair in zip(usable_blocks, left, strict=True)]
            chunks = cache.above(self.num_blocks)
            self.regions = tuple(Region(chunk.offset, chunk.size) for chunk in chunks)
        else:
            self.limits = [1] * len(usable_blocks)
            self.regions = registered.regions

    def release(self, cache: KVCache, holders: Sequence[str]) -> None:
        """Do it, in the transfer thread; `holders` are lost peers that may still come."""
        if self.request == "Shrink":
            cache.shrink(self.num_blocks, is_reachable=bool(holders))
        elif self.request == "Sleep":
            cache.sleep(is_reachable=bool(holders))
        elif holders:
            raise MemoryPinned(f"cache: {', '.join(holders)} may still reach it: it stays in place")
        else:
            cache.defragment()
