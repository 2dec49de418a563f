"""What benches need around a cache: one of a given size, no transport, and signs of no memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from kvxfer.cache.budget import open_files_needed
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ConnectorError, ModelOutOfMemory, OutOfMemory
from kvxfer.memory.chunks import LARGEST_CHUNK
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region
from kvxfer.worker.device import make_driver

NO_MEMORY_TEXTS = ("out of memory", "ALLOC_FAILED")
"""Of errors that libraries raise under torch (cuBLAS, a graph's first launch)."""


class NoConnector(Connector):
    """Stands where a worker has its transport, and takes no memory: nobody is connected."""

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        del agent_name, memory

    def register(self, regions: Sequence[Region]) -> None:
        """There is nothing to tell."""

    def deregister(self, regions: Sequence[Region]) -> None:
        """There is nothing to tell."""

    def describe(self, regions: Sequence[Region]) -> bytes:
        return b""

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        raise ConnectorError(f"a bench without a connector cannot reach {peer}")

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        raise ConnectorError(f"a bench without a connector cannot reach {peer}")

    def poll(self) -> list[TicketResult]:
        return []

    def disconnect(self, peer: str) -> None:
        """Nobody is connected."""

    def close(self) -> None:
        """There is nothing to release."""


def driver_of(device: str) -> VmmDriver:
    """The device's virtual-memory driver, plain memory where it has none."""
    found = make_driver(device)
    return FixedDriver(device) if isinstance(found, str) else found


def open_cache(
    driver: VmmDriver,
    specs: Sequence[KVCacheSpec],
    layout: KVCacheLayout,
    num_blocks: Sequence[int],
    undo: ExitStack,
) -> KVCache:
    """A cache of exactly so many blocks of each group, all committed; closed by `undo`."""
    layouts = [layout] * len(specs)
    geometry = CacheGeometry.build(specs, layouts, num_blocks, driver.granularity)
    if driver.device == "cpu":
        groups = geometry.groups
        ensure_open_files(
            sum(open_files_needed(g, g.capacity_blocks, LARGEST_CHUNK) for g in groups)
        )
    cache = KVCache(driver, geometry)
    undo.callback(cache.close)
    cache.extend(num_blocks)
    return cache


def use_device(device: str) -> None:
    """Make a GPU the current one of this thread: kernels are launched on it."""
    if device != "cpu":
        torch.cuda.set_device(device)


def release_unused(device: str) -> None:
    """Give back what torch keeps for later. What a caught error's frames held must be gone."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that the device's memory did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory, ModelOutOfMemory)):
        return True
    texts = isinstance(error, RuntimeError) and any(t in str(error) for t in NO_MEMORY_TEXTS)
    return bool(texts)
