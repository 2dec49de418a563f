"""The conservation law of blocks, checked whenever the last request has gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvxfer.cache.pools import BlockPools
from kvxfer.errors import CacheError

logger = logging.getLogger(__name__)

REST_S = 0.25
"""How long a worker has been idle before each block is looked at: with many blocks that takes
milliseconds, which a request that comes next would wait for."""


class Conservation:
    """Control thread only. At once the counts are checked, after a rest every block. A leak is told
    in the log, and the blocks stay where they are: never reused."""

    def __init__(self, pools: BlockPools, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools = pools
        self._clock = clock
        self._is_busy = False
        self._look_at_s: float | None = None

    def tick(self, is_busy: bool) -> None:
        """Told at every turn whether any request is here."""
        if is_busy:
            self._look_at_s = None
        elif self._is_busy:
            self._look_at_s = self._clock() + REST_S
            self._check(self._check_counts)
        elif self._look_at_s is not None and self._clock() >= self._look_at_s:
            self._look_at_s = None
            self._check(self._pools.check_conservation)
        self._is_busy = is_busy

    def _check_counts(self) -> None:
        counts = self._pools.counts()
        if counts.used or counts.quarantined:
            raise CacheError(f"blocks are held for no request: {counts}")
        found = counts.free + counts.cached + counts.null
        if found != counts.total:
            raise CacheError(f"{found} blocks are accounted for, not {counts.total}: {counts}")

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except CacheError as error:
            logger.error("conservation is broken at idle: %s", error)
