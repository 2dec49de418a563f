"""Growth ahead of need, and memory given back when there is none: an elastic cache between marks.

blocks free ─┬─ above the high mark for TRIM_AFTER_S: give back what is unused
             ├─ between: leave it
             └─ below the low mark: grow by the usual factor, before a request has to wait
"""

from __future__ import annotations

import logging
import math
import time

from kvxfer.config import WorkerOptions
from kvxfer.control.cache_messages import CacheState
from kvxfer.worker.engine import Engine
from kvxfer.worker.growth import CacheGrowth
from kvxfer.worker.residency import Residency, ResidencyState

logger = logging.getLogger(__name__)

TRIM_AFTER_S = 10.0
BACK_OFF_S = 0.5
"""Between two growths ahead of need: one that failed says so in the log."""


class Watermarks:
    """Control thread only; ticks at every turn."""

    def __init__(
        self, options: WorkerOptions, engine: Engine, growth: CacheGrowth, residency: Residency
    ) -> None:
        self._engine = engine
        self._growth = growth
        self._residency = residency
        self._low = options.kv_low_watermark
        self._high = options.kv_high_watermark if engine.size == 1 else 1.0
        self._is_elastic = options.kv_commit == "elastic"
        self._grow_at_s = 0.0
        self._above_since_s = math.inf

    def tick(self) -> None:
        if not self._is_elastic or self._residency.state is not ResidencyState.AWAKE:
            return
        now, groups = time.monotonic(), self._engine.pools.groups
        low = [group.num_free < self._low * group.num_blocks for group in groups]
        if any(low) and now >= self._grow_at_s and self._growth.is_idle:
            self._grow_at_s = now + BACK_OFF_S
            pairs = zip(self._engine.pools.num_blocks, low, strict=True)
            self._growth.request([bound + is_low for bound, is_low in pairs])
        if all(group.num_free > self._high * group.num_blocks for group in groups):
            self._maybe_trim(now)
        else:
            self._above_since_s = math.inf

    def _maybe_trim(self, now: float) -> None:
        self._above_since_s = min(self._above_since_s, now)
        if now - self._above_since_s >= TRIM_AFTER_S and self._growth.is_idle:
            self._above_since_s = math.inf
            if self._engine.pools.num_blocks != self._engine.initial_blocks:
                self._residency.trim(_trimmed)


def _trimmed(state: CacheState) -> None:
    if state.problem:
        logger.warning("the high watermark was passed, but: %s", state.problem)
