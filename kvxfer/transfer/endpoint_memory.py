"""The memory behind an endpoint: what it needs of it, and a growable cache of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from kvxfer.cache.kv_cache import Extension, KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import UsageError
from kvxfer.memory.driver import VmmDriver
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region

logger = logging.getLogger(__name__)


class EndpointMemory(Protocol):
    """What an endpoint needs of its memory; block counts are group by group.

    `GrowableCache` and `endpoint_existing.ExistingCache` are the two kinds. Errors as `KVCache`'s.
    """

    connectors: tuple[str, ...]
    """Those that can reach it, unless the engine says which."""
    first_block: int
    """The lowest block that KV may be in."""

    @property
    def geometry(self) -> CacheGeometry: ...

    @property
    def window(self) -> MemoryWindow: ...

    @property
    def views(self) -> list[list[torch.Tensor]]:
        """By group, one [capacity_blocks, H, N, C] per layer."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of which every byte is there, the null block included."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is there, sorted, and nothing else."""

    def extend(self, num_blocks: Sequence[int]) -> Extension: ...

    def retract(self, extension: Extension) -> None: ...

    def above(self, num_blocks: Sequence[int]) -> tuple[Region, ...]: ...

    def blocks_after_shrink(self, num_blocks: Sequence[int]) -> tuple[int, ...]: ...

    def shrink(self, num_blocks: Sequence[int]) -> None: ...

    def close(self, holders: Sequence[str]) -> None:
        """`holders` are peers that may still reach it."""


class GrowableCache:
    """Owns `cache`."""

    connectors: tuple[str, ...] = ("peer", "nixl")
    first_block = 1

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.geometry = cache.geometry

    @classmethod
    def create(
        cls,
        device: str,
        specs: Sequence[KVCacheSpec],
        layouts: Sequence[KVCacheLayout],
        capacity_blocks: Sequence[int],
        initial_blocks: Sequence[int],
    ) -> GrowableCache:
        """Addresses for `capacity_blocks` of each group, memory for `initial_blocks`. Raises
        UsageError, DriverError; CapacityExceeded for more blocks than there are addresses."""
        sizes = [len(one) for one in (specs, layouts, capacity_blocks, initial_blocks)]
        if len(set(sizes)) != 1:
            reason = "specs, layouts, capacity_blocks and initial_blocks have an entry a group"
            raise UsageError("specs", sizes, reason)
        driver = driver_for(device)
        geometry = CacheGeometry.build(specs, layouts, capacity_blocks, driver.granularity)
        cache = KVCache(driver, geometry)
        try:
            cache.extend(initial_blocks)
        except BaseException:
            cache.close()
            raise
        return cls(cache)

    @property
    def window(self) -> MemoryWindow:
        buffer = self._cache.buffer
        return MemoryWindow(buffer.base_address, buffer.size_bytes, buffer.device, buffer)

    @property
    def views(self) -> list[list[torch.Tensor]]:
        return self._cache.views

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self._cache.committed_blocks

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(chunk.offset, chunk.size) for chunk in self._cache.buffer.chunks)

    def extend(self, num_blocks: Sequence[int]) -> Extension:
        return self._cache.extend(num_blocks)

    def retract(self, extension: Extension) -> None:
        self._cache.retract(extension)

    def above(self, num_blocks: Sequence[int]) -> tuple[Region, ...]:
        return tuple(Region(c.offset, c.size) for c in self._cache.above(num_blocks))

    def blocks_after_shrink(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        return self._cache.blocks_after_shrink(num_blocks)

    def shrink(self, num_blocks: Sequence[int]) -> None:
        self._cache.shrink(num_blocks)

    def close(self, holders: Sequence[str]) -> None:
        """Where there are holders, the addresses stay taken: as throw-away pages on the host; on a
        GPU the memory stays, too."""
        if not holders:
            self._cache.close()
        elif not self._cache.is_asleep:
            names = ", ".join(holders)
            logger.warning("cache: its addresses stay taken, since %s may still reach it", names)
            self._cache.sleep(is_reachable=True)


def driver_for(device: str) -> VmmDriver:
    """The virtual-memory driver of 'cpu', 'cuda' or 'cuda:N'. Raises UsageError, or DriverError
    where the device has none: bring existing tensors there."""
    if device == "cpu":
        from kvxfer.memory.host import HostDriver

        return HostDriver()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UsageError("device", device, "must be cpu, cuda or cuda:N")
    if torch.version.hip is not None:  # torch calls AMD's devices cuda:N, too
        from kvxfer.memory.hip import HipDriver

        return HipDriver(int(index or 0))
    from kvxfer.memory.cuda import CudaDriver

    return CudaDriver(int(index or 0))
