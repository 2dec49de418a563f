"""The start of a worker: reserve → one granule per segment → warm-up → measure.

What comes after, the extension and its registration, is ordinary growth (`worker.growth`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from kvxfer.cache.blocks import BlockAllocator
from kvxfer.cache.kv_cache import KVCache, open_files_needed
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.sizing import (
    MemoryAccount,
    WarmUp,
    account_after_warm_up,
    account_as_given,
    account_by_estimate,
)
from kvxfer.config import CPU_KV_CACHE_BYTES, WorkerOptions
from kvxfer.errors import UsageError
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.memory.usage import UsageMeter
from kvxfer.memory.virtual_buffer import LARGEST_CHUNK
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.transfer.connector import Connector, MemoryWindow
from kvxfer.worker.device import resolve_device, resolve_memory

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Engine:
    """What one worker computes with and moves, warmed up and measured. Owns all of it, except
    that the connector is closed by the transfer thread."""

    options: WorkerOptions
    info: ModelInfo
    runner: ModelRunner
    driver: VmmDriver
    cache: KVCache
    connector: Connector
    """Made before warm-up was measured, so that its memory is in the account."""
    allocator: BlockAllocator
    account: MemoryAccount
    bound_blocks: int
    """Blocks that the measured budget pays for: growth never goes beyond."""

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may come to: the model's, the option's, the cache's bound."""
        limit = min(self.options.max_model_len or self.info.max_model_len, self.info.max_model_len)
        block_size = self.cache.geometry.spec.block_size
        return min(limit, (self.bound_blocks - 1) * block_size)

    @property
    def initial_blocks(self) -> int:
        """Blocks to commit before the first request: the null block and one more at the least."""
        if self.options.kv_commit == "all":
            return self.bound_blocks
        wanted = self.options.kv_initial_blocks or -(-self.bound_blocks // 16)
        return min(self.bound_blocks, max(2, wanted, self.cache.committed_blocks))

    def affordable_blocks(self) -> int:
        """Blocks in all that the memory which is free right now pays for, measured anew."""
        if self.options.kv_cache_memory_bytes:
            return self.bound_blocks
        spare = max(0, self.driver.memory_info().free_bytes - self.account.buffer)
        more = spare // self.cache.geometry.spec.block_bytes
        return min(self.bound_blocks, self.cache.committed_blocks + more)

    def enter_thread(self) -> None:
        """Make the device's primary context current in the calling thread: CUDA keeps it by
        thread, and NIXL and the driver API use whichever is current."""
        if self.driver.device != "cpu":
            import torch

            torch.cuda.set_device(self.driver.device)

    def close(self) -> None:
        self.runner.close()
        self.cache.close()


class Start:
    """The steps of the start, in order; each leaves its result here. `undo` is the caller's."""

    def __init__(self, options: WorkerOptions, progress: Progress, undo: ExitStack) -> None:
        self.options = options
        self.progress = progress
        self.undo = undo
        self.info = inspect_model(options.model)
        self.layout = KVCacheLayout.parse("kv_cache_layout", options.kv_cache_layout)
        device = resolve_device(options.device)
        self.memory = resolve_memory(options, device)
        self.meter = UsageMeter(self.memory.driver)
        self._warn_if_shared()
        policy = self.memory.policy
        self.available = self.meter.available_bytes(policy.utilization, options.memory_budget_bytes)
        self.runner = self._load(device)
        self.weights = self.meter.used_bytes(0)
        self.spec = self.runner.probe_spec(options.block_size)

    def _warn_if_shared(self) -> None:
        shared = self.meter.shared_with()
        if shared and not self.memory.policy.utilization_given:
            logger.warning(
                "the GPU is shared: %s; the default gpu_memory_utilization assumes that it is this "
                "worker's alone: give it explicitly",
                shared,
            )

    def _load(self, device: str) -> ModelRunner:
        options = self.options
        self.progress(f"loading {self.info.architecture} on {device}")
        dtype = None if options.dtype == "auto" else options.dtype
        runner = ModelRunner.load(self.info, device, dtype, options.threads)
        self.undo.callback(runner.close)
        return runner

    def reserve(self, capacity_blocks: int) -> KVCache:
        """Steps 1 and 2: addresses for the whole capacity, one granule per segment."""
        driver = self.memory.driver
        geometry = CacheGeometry.build(self.spec, self.layout, capacity_blocks, driver.granularity)
        if driver.device == "cpu":
            ensure_open_files(open_files_needed(geometry, capacity_blocks, LARGEST_CHUNK))
        cache = KVCache(driver, geometry)
        self.undo.callback(cache.close)
        cache.extend(1)
        self.runner.bind(cache.views)
        return cache

    def connect(
        self, connector_type: type[Connector], incarnation: str, cache: KVCache
    ) -> Connector:
        """The connector, before warm-up is measured: its memory is in the account (S15)."""
        options = self.options
        self.progress(f"starting the {options.connector} connector")
        window = MemoryWindow(
            cache.buffer.base_address, cache.geometry.total_bytes, self.memory.driver.device
        )
        connector = connector_type(f"{options.worker_id}.{incarnation}", window)
        self.undo.callback(connector.close)
        return connector

    def warm_up(self, cache: KVCache, transfer: int) -> WarmUp:
        """Step 3: real shapes, then what is held."""
        self.progress("warming up")
        options = self.options
        self.runner.warm_up(options.max_num_batched_tokens, options.max_num_seqs)
        held = self._cache_bytes(cache)
        used = self.meter.used_bytes(held)
        graphs = max(0, used - self.weights - transfer)
        return WarmUp(self.weights, transfer, graphs, self.meter.peak_bytes(used, held))

    def _cache_bytes(self, cache: KVCache) -> int:
        """What the cache holds of the device: a fixed one holds its whole reservation."""
        return cache.committed_bytes if self.memory.policy.extensible else cache.reserved_bytes

    def capacity_blocks(self) -> int:
        """Blocks to reserve addresses for: an upper bound of what may ever be committed."""
        options, block_bytes = self.options, self.spec.block_bytes
        if options.kv_cache_memory_bytes:
            wanted = options.kv_cache_memory_bytes
            if wanted < 2 * block_bytes:
                raise UsageError(
                    "kv_cache_memory_bytes", wanted, f"two blocks need {2 * block_bytes}"
                )
            return wanted // block_bytes
        available = self.available
        if self.memory.driver.device == "cpu":
            available = min(available, CPU_KV_CACHE_BYTES)
        return max(2, available // block_bytes)

    def estimate_blocks(self) -> int:
        """The size of a fixed cache: profiled over a small one, which is given back (S13)."""
        capacity = self.capacity_blocks()
        if self.options.kv_cache_memory_bytes:
            return capacity
        with ExitStack() as scratch:
            outer, self.undo = self.undo, scratch
            profiled = self.warm_up(self.reserve(2), 0)
            self.undo = outer
        account = account_by_estimate(self.available, profiled)
        return max(2, min(capacity, account.kv // self.spec.block_bytes))


def start_engine(
    options: WorkerOptions, connector_type: type[Connector], incarnation: str, progress: Progress
) -> Engine:
    """Load the model, reserve the cache, warm up, measure. Leaves nothing behind on failure."""
    with ExitStack() as undo:
        start = Start(options, progress, undo)
        extensible = start.memory.policy.extensible
        capacity = start.capacity_blocks() if extensible else start.estimate_blocks()
        cache = start.reserve(capacity)
        before = start.meter.used_bytes(0)
        connector = start.connect(connector_type, incarnation, cache)
        transfer = max(0, start.meter.used_bytes(0) - before)
        warm_up = start.warm_up(cache, transfer)
        account = _account(start, warm_up, cache)
        bound = min(capacity, account.kv // start.spec.block_bytes)
        if bound < 2:
            raise UsageError(
                "memory_budget_bytes",
                start.available,
                f"leaves {account.kv} bytes for KV, too few for 2 blocks",
            )
        undo.pop_all()
    for line in account.lines():
        logger.info("memory: %s", line)
    logger.info(
        "memory: %d blocks of %d tokens, the null block included", bound, options.block_size
    )
    return Engine(
        options=options,
        info=start.info,
        runner=start.runner,
        driver=start.memory.driver,
        cache=cache,
        connector=connector,
        allocator=BlockAllocator(1),
        account=account,
        bound_blocks=bound,
    )


def _account(start: Start, warm_up: WarmUp, cache: KVCache) -> MemoryAccount:
    """Step 4's bound. An explicit size is taken at its word; a fixed one cannot change any more."""
    if start.options.kv_cache_memory_bytes:
        size = cache.geometry.capacity_blocks * start.spec.block_bytes
        return account_as_given(start.available, warm_up, size)
    if not start.memory.policy.extensible:
        size = cache.geometry.capacity_blocks * start.spec.block_bytes
        estimate = account_by_estimate(start.available, warm_up)
        return replace(estimate, kv=size, note="fixed before graphs were captured")
    return account_after_warm_up(start.available, warm_up, cache.committed_bytes)
