"""The steps of a worker's start, each leaving its result for the next (`worker.engine`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvxfer.cache.budget import CacheBudget, open_files_needed
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry
from kvxfer.cache.sizing import WarmUp, account_by_estimate
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import CPU_KV_CACHE_BYTES, WorkerOptions
from kvxfer.errors import UsageError
from kvxfer.memory.chunks import LARGEST_CHUNK
from kvxfer.memory.limits import ensure_open_files
from kvxfer.memory.usage import UsageMeter
from kvxfer.model.groups import Place
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.packing import SequenceStep
from kvxfer.model.runner import ModelRunner
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker.device import resolve_devices, resolve_memory
from kvxfer.worker.layouts import resolve_layouts
from kvxfer.worker.rank_transfer import RankTransfer, WorkerTransfer
from kvxfer.worker.ranks import RankGroup
from kvxfer.worker.scratch import transfer_bytes

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


class Runner(Protocol):
    """What workers need of a ModelRunner, which may run in several ranks."""

    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None: ...

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WarmUpHook:
    """Something else that allocates in service: encoder caches, draft models, logits buffers."""

    name: str
    """Its row in the account."""
    run: Callable[[ModelRunner], object]
    """Takes, once, as much as it ever will. What it keeps it owns. The runner that it is given is
    warmed up, and of its cache only the null block may be touched."""


class Start:
    """In order; each step leaves its result here. `undo` is the caller's."""

    group: RankGroup | None = None

    def __init__(
        self,
        options: WorkerOptions,
        connectors: Mapping[str, type[Connector]],
        progress: Progress,
        undo: ExitStack,
    ) -> None:
        self.options = options
        self.progress = progress
        self.undo = undo
        self.connectors = connectors
        self.info = self.inspect()
        self.devices = resolve_devices(options.device, options.tensor_parallel_size)
        self.memory = resolve_memory(options, self.devices[0])
        self.meter = UsageMeter(self.memory.driver)
        self._warn_if_shared()
        policy = self.memory.policy
        self.available = self.meter.available_bytes(policy.utilization, options.memory_budget_bytes)
        self.progress(f"loading {self.info.architecture} on {', '.join(self.devices)}")
        dtype = None if options.dtype == "auto" else options.dtype
        self.specs = self.load(dtype)
        self.layouts = resolve_layouts(options, self.specs, connectors)

    def _warn_if_shared(self) -> None:
        shared = self.meter.shared_with()
        if shared and not self.memory.policy.utilization_given:
            logger.warning(
                "the GPU is shared: %s; the default gpu_memory_utilization assumes that it is this "
                "worker's alone: give it explicitly",
                shared,
            )

    def inspect(self) -> ModelInfo:
        return inspect_model(self.options.model)

    def load(self, dtype: str | None) -> tuple[KVCacheSpec, ...]:
        """The model, whose `runner` and `weights` in bytes are kept; returns its groups' specs."""
        runner = ModelRunner.load(self.info, self.devices[0], dtype, self.options.threads)
        self.undo.callback(runner.close)
        self.model = runner
        self.runner: Runner = runner
        self.weights = self.meter.used_bytes(0)
        return runner.probe_specs(self.options.block_size)

    def capacities(self) -> list[int]:
        """Blocks of each group to reserve addresses for: as if it took the budget alone."""
        two = 2 * sum(spec.block_bytes for spec in self.specs)
        available = self.options.kv_cache_memory_bytes
        if available and available < two:
            raise UsageError("kv_cache_memory_bytes", available, f"two blocks need {two}")
        if not available:
            available = self.available
            if self.memory.driver.device == "cpu":
                available = min(available, CPU_KV_CACHE_BYTES // len(self.devices))
        return [max(2, available // spec.block_bytes) for spec in self.specs]

    def geometry(self, capacities: Sequence[int]) -> CacheGeometry:
        granularity = self.memory.driver.granularity
        return CacheGeometry.build(self.specs, self.layouts, capacities, granularity)

    def budget(self, geometry: CacheGeometry, kv_bytes: int) -> CacheBudget:
        return CacheBudget(geometry, kv_bytes, self.options.max_num_batched_tokens)

    def estimate(self, capacities: Sequence[int]) -> list[int]:
        """The size of a fixed cache: profiled over a small one, which is given back (S13)."""
        kv_bytes = self.options.kv_cache_memory_bytes
        if not kv_bytes:
            with ExitStack() as scratch:
                outer, self.undo = self.undo, scratch
                profiled = self.warm_up(self.reserve([2] * len(self.specs)), 0, ())
                self.undo = outer
            kv_bytes = account_by_estimate(self.available, profiled).kv
        budget = self.budget(self.geometry(capacities), kv_bytes)
        longest = budget.longest_sequence(self.options.max_model_len or self.info.max_model_len)
        return budget.shares(budget.floors(longest), self.options.max_num_seqs)

    def reserve(self, capacities: Sequence[int]) -> KVCache:
        """Steps 1 and 2: addresses for the whole capacity, one granule per segment."""
        driver = self.memory.driver
        geometry = self.geometry(capacities)
        if driver.device == "cpu":
            groups = geometry.groups
            own = sum(open_files_needed(one, one.capacity_blocks, LARGEST_CHUNK) for one in groups)
            ensure_open_files(own, own)  # and the chunks of a peer that are mapped here
        self.check_budget(geometry)
        cache = KVCache(driver, geometry)
        self.undo.callback(cache.close)
        cache.extend([1] * len(capacities))
        self.model.bind(cache.views)
        return cache

    def check_budget(self, geometry: CacheGeometry) -> None:
        """Raises UsageError for one that is smaller than what the start commits at the least."""
        given = self.options.kv_cache_memory_bytes
        budget = given or self.available
        least = geometry.committed_bytes([1] * len(geometry.groups))
        if self.memory.policy.extensible and least > budget:
            segments = sum(group.num_segments for group in geometry.groups)
            granule = geometry.granularity
            reason = f"{segments} segments with a granule of {granule} bytes each need {least}"
            field = "kv_cache_memory_bytes" if given else "memory_budget_bytes"
            raise UsageError(field, budget, reason)

    def connect(self, incarnation: str, cache: KVCache, initiates: Direction) -> MultiConnector:
        """The connectors, before warm-up is measured: its memory is in the account (S15)."""
        options = self.options
        self.progress(f"starting connectors: {', '.join(self.connectors)}")
        device = self.memory.driver.device
        buffer = cache.buffer if self.memory.policy.extensible else None
        window = MemoryWindow(cache.buffer.base_address, cache.geometry.total_bytes, device, buffer)
        agent = f"{options.worker_id}.{incarnation}"
        named = options.is_connector_named
        connector = MultiConnector.open(
            self.connectors, agent, window, initiates, named, options.lane
        )
        self.undo.callback(connector.close)
        return connector

    def transfer_bytes(self, connector: MultiConnector, before: int) -> int:
        """What the connectors take of the device when they move something; `before` was used before
        they were made. Tried on scratch memory of the cache's kind, which is given back."""
        return transfer_bytes(connector, self.memory.driver, self.meter, before)

    def transfer(self, connector: MultiConnector, cache: KVCache) -> WorkerTransfer:
        """What the transfer thread calls from now on."""
        return RankTransfer(connector, cache)

    def warm_up(self, cache: KVCache, transfer: int, hooks: Sequence[WarmUpHook]) -> WarmUp:
        """Step 3: real shapes, then whatever else allocates, then what is held."""
        self.progress("warming up")
        options = self.options
        self.model.warm_up(options.max_num_batched_tokens, options.max_num_seqs)
        held = self._cache_bytes(cache)
        used = self.meter.used_bytes(held)
        graphs = max(0, used - self.weights - transfer)
        kept = []
        for hook in hooks:
            self.progress(f"warming up: {hook.name}")
            hook.run(self.model)
            before, used = used, self.meter.used_bytes(held)
            kept.append((hook.name, max(0, used - before)))
        peak = self.meter.peak_bytes(used, held)
        return WarmUp(self.weights, transfer, graphs, peak, tuple(kept))

    def _cache_bytes(self, cache: KVCache) -> int:
        """What the cache holds of the device: a fixed one holds its whole reservation."""
        return cache.committed_bytes if self.memory.policy.extensible else cache.reserved_bytes
