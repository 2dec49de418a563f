"""The start of a worker of several ranks: the same steps, each in all of them at once.

On a GPU each rank has a device of its own. On the CPU they share the host: each has its part of the
budget. The rank with the least memory left decides for all, since all have as many blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.sizing import WarmUp
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ModelError, UsageError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker.rank_host import RankCache, RankUsage
from kvxfer.worker.rank_transfer import WorkerTransfer
from kvxfer.worker.ranked_runner import RankedRunner
from kvxfer.worker.ranked_transfer import RankedTransfer
from kvxfer.worker.ranks import RankGroup
from kvxfer.worker.start import Start, WarmUpHook

T = TypeVar("T")


class RankedStart(Start):
    """As Start; called in the main thread, which lives as long as the followers should."""

    group: RankGroup

    def load(self, dtype: str | None) -> tuple[KVCacheSpec, ...]:
        options = self.options
        if not self.memory.policy.extensible:
            reason = f"needs a cache that can grow: {self.memory.policy.reason}"
            raise UsageError("tensor_parallel_size", options.tensor_parallel_size, reason)
        self.group = RankGroup(self.devices)
        self.undo.callback(self.group.close)
        self.group.call("load", str(options.model), dtype, options.threads)
        self.runner = RankedRunner(self.group)
        self.available = min(one.available for one in self._measure())
        return _agreed(self.group.call("probe_specs", options.block_size))

    def reserve(self, capacities: Sequence[int]) -> KVCache:
        self.check_budget(self.geometry(capacities))
        reserved: list[RankCache] = self.group.call("reserve", self.layouts, list(capacities))
        self._bases = [one.base_address for one in reserved]
        _agreed([one.geometry for one in reserved])
        return self.group.host.cache

    def connect(self, incarnation: str, cache: KVCache, initiates: Direction) -> MultiConnector:
        options, names = self.options, list(self.connectors)
        self.progress(f"starting connectors: {', '.join(names)}")
        agent = f"{options.worker_id}.{incarnation}"
        named = options.is_connector_named
        how = initiates, named, options.lane
        opened = self.group.call("open_connectors", names, agent, *how)
        self._opened = [name for name in names if all(name in those for those in opened)]
        if not self._opened:
            reason = f"the ranks have none in common: {opened}"
            raise UsageError("connector", options.connector, reason)
        return self.group.host.connector

    def transfer_bytes(self, connector: MultiConnector, before: int) -> int:
        """Each rank has measured its own."""
        return 0

    def transfer(self, connector: MultiConnector, cache: KVCache) -> WorkerTransfer:
        return RankedTransfer(self.group, self._opened, self._bases)

    def warm_up(self, cache: KVCache, transfer: int, hooks: Sequence[WarmUpHook]) -> WarmUp:
        if hooks:
            size = self.options.tensor_parallel_size
            raise UsageError("tensor_parallel_size", size, "warm-up hooks run in one process")
        self.progress("warming up")
        options = self.options
        self.group.call("warm_up", options.max_num_batched_tokens, options.max_num_seqs, None)
        least = min(self._measure(), key=lambda one: one.available - one.used - one.peak)
        self.available = least.available
        graphs = max(0, least.used - least.weights - least.transfer)
        return WarmUp(least.weights, least.transfer, graphs, least.peak)

    def _measure(self) -> list[RankUsage]:
        """By rank."""
        size = len(self.devices)
        shared = self.meter.at_start.free_bytes if self.devices[0] == "cpu" else 0
        budget = (self.options.memory_budget_bytes or shared) // size
        found: list[RankUsage] = self.group.call("measure", self.memory.policy.utilization, budget)
        return found


def _agreed(found: Sequence[T]) -> T:
    for rank, one in enumerate(found):
        if one != found[0]:
            raise ModelError(f"rank 0 has {found[0]} where rank {rank} has {one}")
    return found[0]
