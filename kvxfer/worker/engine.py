"""The start of a worker: reserve → one granule per segment → warm-up → measure.

What comes after, the extension and its registration, is ordinary growth (`worker.growth`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvxfer.cache.blocks import BlockAllocator
from kvxfer.cache.kv_cache import KVCache, open_files_needed
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.sizing import MemoryAccount, account_after_warm_up
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import CPU_KV_CACHE_BYTES, WorkerOptions, check_device
from kvxfer.errors import UsageError
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.host import HostDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.memory.usage import UsageMeter
from kvxfer.memory.virtual_buffer import LARGEST_CHUNK
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.transfer.connector import Connector, MemoryWindow

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

    def enter_thread(self) -> None:
        """Make the device's primary context current in the calling thread: CUDA keeps it by
        thread, and NIXL and the driver API use whichever is current."""
        if self.driver.device != "cpu":
            import torch

            torch.cuda.set_device(self.driver.device)

    def close(self) -> None:
        self.runner.close()
        self.cache.close()


def make_driver(device: str) -> VmmDriver:
    """The driver for a resolved device: 'cpu', 'cuda' or 'cuda:N'."""
    if device == "cpu":
        return HostDriver()
    from kvxfer.memory.cuda import CudaDriver

    return CudaDriver(int(device.partition(":")[2] or 0))


def resolve_device(name: str) -> str:
    """'auto' becomes cuda:0 where torch sees a GPU, else cpu; what is not there is refused."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if check_device(name) == "auto":
        device = "cuda:0" if count else "cpu"
        logger.info("device %s: torch sees %d CUDA device(s)", device, count)
        return device
    if name == "cpu":
        return name
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise UsageError("device", name, f"torch sees {count} CUDA device(s)")
    return f"cuda:{index}"


def start_engine(
    options: WorkerOptions, connector_type: type[Connector], incarnation: str, progress: Progress
) -> Engine:
    """Load the model, reserve the cache, warm up, measure. Leaves nothing behind on failure."""
    info = inspect_model(options.model)
    layout = KVCacheLayout.parse("kv_cache_layout", options.kv_cache_layout)
    device = resolve_device(options.device)
    driver = make_driver(device)
    meter = UsageMeter(driver)
    progress(f"loading {info.architecture} on {device}")
    dtype = None if options.dtype == "auto" else options.dtype
    with ExitStack() as undo:
        runner = ModelRunner.load(info, device, dtype, options.threads)
        undo.callback(runner.close)
        spec = runner.probe_spec(options.block_size)
        available = options.memory_budget_bytes or meter.available_bytes
        capacity = _capacity_blocks(options, spec, device, available)
        geometry = CacheGeometry.build(spec, layout, capacity, driver.granularity)
        ensure_open_files(open_files_needed(geometry, capacity, LARGEST_CHUNK))
        cache = KVCache(driver, geometry)
        undo.callback(cache.close)
        cache.extend(1)
        runner.bind(cache.views)
        progress(f"starting the {options.connector} connector")
        window = MemoryWindow(cache.buffer.base_address, geometry.total_bytes, device)
        connector = connector_type(f"{options.worker_id}.{incarnation}", window)
        undo.callback(connector.close)
        progress("warming up")
        runner.warm_up(options.max_num_batched_tokens, options.max_num_seqs)
        use = meter.measure(cache.committed_bytes)
        account = account_after_warm_up(
            available, use.used_bytes, use.peak_bytes - use.used_bytes, cache.committed_bytes
        )
        bound = _bound_blocks(options, spec, capacity, account)
        if bound < 2:
            raise UsageError(
                "memory_budget_bytes", available, f"leaves {account.kv} bytes, too few for 2 blocks"
            )
        undo.pop_all()
    _log_account(account, bound, spec)
    allocator = BlockAllocator(1)
    return Engine(options, info, runner, driver, cache, connector, allocator, account, bound)


def _capacity_blocks(options: WorkerOptions, spec: KVCacheSpec, device: str, available: int) -> int:
    """Blocks to reserve addresses for: an upper bound of what may ever be committed."""
    if options.kv_cache_memory_bytes:
        wanted = options.kv_cache_memory_bytes
        if wanted < 2 * spec.block_bytes:
            raise UsageError(
                "kv_cache_memory_bytes", wanted, f"two blocks need {2 * spec.block_bytes}"
            )
        return wanted // spec.block_bytes
    if device == "cpu":
        available = min(available, CPU_KV_CACHE_BYTES)
    return max(2, available // spec.block_bytes)


def _bound_blocks(
    options: WorkerOptions, spec: KVCacheSpec, capacity: int, account: MemoryAccount
) -> int:
    """An explicit size is taken at its word (S9); else what the account leaves."""
    if options.kv_cache_memory_bytes:
        return capacity
    return min(capacity, account.kv // spec.block_bytes)


def _log_account(account: MemoryAccount, bound: int, spec: KVCacheSpec) -> None:
    for line in account.lines():
        logger.info("memory: %s", line)
    logger.info("memory: %d blocks of %d tokens, the null block included", bound, spec.block_size)
