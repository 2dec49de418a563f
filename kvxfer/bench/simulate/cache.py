"""A worker's KV cache in the model: blocks that are free, held or not committed yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from kvxfer.bench.simulate.costs import Costs
from kvxfer.cache.budget import GROWTH_FACTOR

ELASTIC_SHARE = 16
"""Of the capacity an elastic cache commits the sixteenth at first, as kv_initial_blocks says."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Of every worker of a role."""

    capacity: int
    """Blocks, without the null block."""
    block_size: int
    is_elastic: bool
    low_watermark: float

    def blocks(self, num_tokens: int) -> int:
        """That so many tokens of KV take."""
        return -(-num_tokens // self.block_size)


class Cache:
    """free + used == committed <= capacity, always."""

    def __init__(
        self, env: simpy.Environment, shape: CacheShape, costs: Costs, grown: Callable[[], None]
    ) -> None:
        """`grown` is called when new blocks are of use."""
        self._env = env
        self._costs = costs
        self._grown = grown
        self.shape = shape
        first = max(1, shape.capacity // ELASTIC_SHARE) if shape.is_elastic else shape.capacity
        self.committed = first
        self.used = 0
        self.peak = 0
        self.is_growing = False
        self.num_growths = 0
        self._since_s = env.now
        self._used_s = 0.0

    @property
    def free(self) -> int:
        return self.committed - self.used

    def take(self, num_blocks: int, spare: int = 0) -> bool:
        """Whether they were free, `spare` more too; they are used from now on. If not, or if few
        are left, an elastic cache grows."""
        has_them = self.free >= num_blocks + spare
        if has_them:
            self._count(num_blocks)
        is_low = self.free < self.shape.low_watermark * self.committed
        if not has_them or (is_low and self.shape.is_elastic):
            self._grow(self.used + (0 if has_them else num_blocks + spare))
        return has_them

    def give(self, num_blocks: int) -> None:
        self._count(-num_blocks)
        assert self.used >= 0

    def mean_use(self) -> float:
        """The share of the capacity that was used, over the time so far."""
        self._count(0)
        whole = self._env.now * self.shape.capacity
        return self._used_s / whole if whole > 0 else 0.0

    def _count(self, change: int) -> None:
        self._used_s += self.used * (self._env.now - self._since_s)
        self._since_s = self._env.now
        self.used += change
        self.peak = max(self.peak, self.used)

    def _grow(self, wanted: int) -> None:
        """To what is wanted, and by the usual factor at least; one growth at a time."""
        if self.is_growing or self.committed >= self.shape.capacity:
            return
        target = max(wanted, math.ceil(self.committed * GROWTH_FACTOR))
        target = min(self.shape.capacity, target)
        self.is_growing = True
        self.num_growths += 1
        more = target - self.committed
        took_s = self._costs.growth_s + self._costs.growth_block_s * more

        def end(_: simpy.Event) -> None:
            self.committed, self.is_growing = target, False
            self._grown()

        wait = self._env.timeout(took_s)
        assert wait.callbacks is not None
        wait.callbacks.append(end)
