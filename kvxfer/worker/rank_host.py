"""What each rank of a tensor-parallel worker owns and does; `worker.rank_methods` is the table of
what can be asked of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvxfer.cache.budget import open_files_needed
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.control.facts import RankFacts
from kvxfer.errors import CacheError, ModelError
from kvxfer.memory.chunks import LARGEST_CHUNK
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.memory.usage import UsageMeter
from kvxfer.model.loader import inspect_model
from kvxfer.model.packing import SequenceStep
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.transfer.checksum_shard import KVShard
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult, load_connectors
from kvxfer.transfer.digest import prompt_digests
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.plan_parts import MoveParts
from kvxfer.transfer.rank_plans import num_holders, total_heads
from kvxfer.transfer.regions import Region
from kvxfer.transfer.shards import head_range
from kvxfer.worker.checksums import checksum_of
from kvxfer.worker.device import make_driver
from kvxfer.worker.rank_transfer import Growth, RankTransfer, Submitted
from kvxfer.worker.scratch import transfer_bytes


@dataclass(frozen=True, slots=True)
class RankCache:
    """A rank's cache, as its Hello tells it: the same strides everywhere, other addresses."""

    geometry: CacheGeometry
    base_address: int
    committed_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Bytes of a rank's memory, the KV cache excluded."""

    available: int
    """What the rank may use in all."""
    weights: int
    transfer: int
    used: int
    """In all: weights and connectors, and what the model keeps beside them."""
    peak: int
    """The most that was held for a moment beyond `used`."""


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """What a rank has added: blocks backed, group by group, and descriptions as `Growth`'s."""

    backed: tuple[int, ...]
    regions: tuple[Region, ...]
    update: bytes
    description: bytes


class RankHost:
    """One rank's runner and cache. Owns both; which thread may call what is in METHODS."""

    def __init__(self, place: TensorParallel, device: str) -> None:
        self.place = place
        self.device = device
        self._runner: ModelRunner | None = None
        self._cache: KVCache | None = None
        self._specs: tuple[KVCacheSpec, ...] = ()
        self._meter: UsageMeter | None = None
        self._weights = 0
        self._transfer_bytes = 0
        self._transfer: RankTransfer | None = None
        self._growth: Growth | None = None
        self._is_pending = False
        self._shards: list[KVShard] = []

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise ModelError("no model was loaded")
        return self._runner

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise CacheError("no cache was reserved")
        return self._cache

    @property
    def transfer(self) -> RankTransfer:
        if self._transfer is None:
            raise CacheError("no cache was reserved")
        return self._transfer

    @property
    def connector(self) -> MultiConnector:
        return self.transfer.connector

    @property
    def newest_growth(self) -> Growth:
        if self._growth is None:
            raise CacheError("the cache has not grown")
        return self._growth

    def enter_thread(self) -> None:
        """As `Engine.enter_thread`; first in every thread that serves a line."""
        if self.device != "cpu":
            import torch

            torch.cuda.set_device(self.device)

    def load(self, model: str, dtype: str | None, threads: int) -> None:
        """As `ModelRunner.load`, of the directory `model`."""
        if self._runner is not None:
            raise ModelError("a model is loaded already")
        info = inspect_model(Path(model))
        self._meter = UsageMeter(self._driver())
        self._runner = ModelRunner.load(info, self.device, dtype, threads, self.place)
        self._weights = self._meter.used_bytes(0)

    def probe_specs(self, block_size: int) -> tuple[KVCacheSpec, ...]:
        """Those of this rank's heads."""
        self._specs = self.runner.probe_specs(block_size)
        return self._specs

    def reserve(self, layouts: list[KVCacheLayout], capacities: list[int]) -> RankCache:
        """Addresses for `capacities` blocks of each group, a granule per segment committed, and the
        runner bound to it. Errors as `CacheGeometry.build` and `KVCache.extend`."""
        if self._cache is not None:
            raise CacheError("a cache is reserved already")
        driver = self._driver()
        geometry = CacheGeometry.build(self._specs, layouts, capacities, driver.granularity)
        if driver.device == "cpu":
            groups = geometry.groups
            own = sum(open_files_needed(one, one.capacity_blocks, LARGEST_CHUNK) for one in groups)
            ensure_open_files(own, own)  # and the chunks of a peer that are mapped here
        cache = KVCache(driver, geometry)
        try:
            cache.extend([1] * len(capacities))
            self.runner.bind(cache.views)
        except BaseException:
            cache.close()
            raise
        self._cache = cache
        self._transfer = self._transfer_over(MultiConnector({}, Direction.PULL))
        return self.describe()

    def describe(self) -> RankCache:
        cache = self.cache
        return RankCache(cache.geometry, cache.buffer.base_address, cache.committed_blocks)

    def warm_up(self, max_tokens: int, max_batch: int, max_context: int | None) -> None:
        self.runner.warm_up(max_tokens, max_batch, max_context)

    def prefill_chunk(self, step: SequenceStep) -> int | None:
        return self.runner.prefill_chunk(step)

    def decode_step(self, steps: list[SequenceStep]) -> list[int]:
        return self.runner.decode_step(steps)

    def prompt_digests(self, tables: list[BlockTable], num_prompt: int) -> list[str]:
        """Of this rank's heads."""
        return prompt_digests(self.cache, tables, num_prompt)

    def kv_checksum(
        self, blocks: list[list[int]], num_prompt: int, theirs: list[KVCacheSpec], num_cached: int
    ) -> int:
        """Of this rank's heads, as `worker.checksums`; what several ranks hold is the first's."""
        if not self._shards:
            self._shards = self._make_shards()
        rank, size = self.place.rank, self.place.size
        counts = [rank % num_holders(spec, size) == 0 for spec in self._specs]
        named = blocks, num_prompt, theirs, counts, num_cached
        return checksum_of(self._shards, self._specs, *named)

    def measure(self, utilization: float, budget_bytes: int) -> RankUsage:
        """What the rank may use and does; options as `UsageMeter.available_bytes`."""
        if self._meter is None:
            raise ModelError("no model was loaded")
        held = self._cache.committed_bytes if self._cache is not None else 0
        used = self._meter.used_bytes(held)
        available = self._meter.available_bytes(utilization, budget_bytes)
        peak = self._meter.peak_bytes(used, held)
        return RankUsage(available, self._weights, self._transfer_bytes, used, peak)

    # --- the transfer line ----------------------------------------------------------------------

    def open_connectors(
        self, names: list[str], agent: str, initiates: Direction, all_needed: bool, lane: str
    ) -> list[str]:
        """As `MultiConnector.open`, of this rank's cache, and used once; returns which."""
        cache, driver = self.cache, self.cache.buffer.driver
        before = self._meter.used_bytes(0) if self._meter is not None else 0
        base, size = cache.buffer.base_address, cache.geometry.total_bytes
        window = MemoryWindow(base, size, driver.device, cache.buffer)
        types = load_connectors(",".join(names))
        name = f"{agent}.{self.place.rank}"
        connector = MultiConnector.open(types, name, window, initiates, all_needed, lane)
        with ExitStack() as undo:
            undo.callback(connector.close)
            if self._meter is not None:
                self._transfer_bytes = transfer_bytes(connector, driver, self._meter, before)
            undo.pop_all()
        self._transfer = self._transfer_over(connector)
        return list(connector.connectors)

    def prepare(self, num_blocks: list[int]) -> RankGrowth:
        """First half of a growth: commit and register memory. The blocks that it backs may be used
        after `confirm`; errors as `RankTransfer.grow`."""
        if self._is_pending:
            raise CacheError("a growth is prepared already")
        growth = self.transfer.grow(num_blocks)
        self._growth, self._is_pending = growth, True
        (update,), (whole,) = growth.updates, growth.descriptions
        return RankGrowth(growth.extension.new_blocks, growth.regions, update, whole)

    def confirm(self) -> None:
        """All ranks have prepared: the growth stays."""
        self._is_pending = False

    def retract(self) -> None:
        """Take back what was prepared, if anything was."""
        if self._is_pending:
            self._is_pending = False
            self.transfer.retract(self.newest_growth)

    def revoke(self, left: list[Region], epoch: int) -> bytes:
        return self.transfer.revoke(left, epoch)[0]

    def retire(self, kept: frozenset[int]) -> None:
        self.transfer.retire(kept)

    def connect(self, peer: str, ranks: list[RankFacts]) -> frozenset[str]:
        return self.transfer.connect(peer, ranks)

    def renew(self, peer: str, ranks: list[RankFacts]) -> frozenset[str]:
        return self.transfer.renew(peer, ranks)

    def disconnect(self, peer: str) -> None:
        self.transfer.disconnect(peer)

    def submit(self, peer: str, lane: Lane, moves: list[MoveParts]) -> list[Submitted]:
        return self.transfer.submit(peer, lane, [parts.move() for parts in moves])

    def poll(self) -> list[TicketResult]:
        return self.transfer.poll()

    def write_pattern(self, blocks: list[int], seed: int) -> None:
        self.transfer.write_pattern(blocks, seed)

    def erase_pattern(self, blocks: list[int]) -> None:
        self.transfer.erase_pattern(blocks)

    def check_pattern(self, blocks: list[int], seed: int) -> bool:
        return self.transfer.check_pattern(blocks, seed)

    def close_connectors(self) -> None:
        self.transfer.close()

    # --- the control line -----------------------------------------------------------------------

    def invite(self, count: int) -> list[bytes]:
        return self.transfer.invite(count)[0]

    def _make_shards(self) -> list[KVShard]:
        """Numbered as in the whole model."""
        shards = []
        for group, (views, spec) in enumerate(zip(self.cache.views, self._specs, strict=True)):
            total = total_heads(spec, self.place.size)
            first = head_range(self.place.rank, self.place.size, total).start
            shards.append(KVShard(views, total, first, group))
        return shards

    def close(self) -> None:
        """Idempotent."""
        with ExitStack() as release:
            for owned in (self._runner, self._cache, self._transfer):
                if owned is not None:
                    release.callback(owned.close)

    def _transfer_over(self, connector: MultiConnector) -> RankTransfer:
        return RankTransfer(connector, self.cache, self.place.rank, self.place.size)

    def _driver(self) -> VmmDriver:
        found = make_driver(self.device)
        return FixedDriver(self.device) if isinstance(found, str) else found
