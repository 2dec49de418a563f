"""Growth of one worker's cache, seen from its control thread.

| state      | what happens                                   | leaves by |
| ---        | ---                                            | --- |
| IDLE       | committed == registered == published == usable | `request` → COMMITTING |
| COMMITTING | transfer thread: commit, register, describe    | done → PUBLISHING; error → IDLE |
| PUBLISHING | generation + 1; peers load the new regions     | all acked, or deadline → IDLE |

While paused nothing starts but `restore`, which takes the way of a growth for what is committed
and not registered, as after a sleep. Growth never invalidates anything: transfers in flight go
on, and a peer that does not acknowledge in time is lost, not waited for.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence

from kvxfer.cache.budget import next_growth
from kvxfer.cache.pools import BlockPools
from kvxfer.control.messages import RegionsUpdate
from kvxfer.errors import CacheError, KvxferError
from kvxfer.telemetry.families import GROWTH_S
from kvxfer.telemetry.metrics import Tally
from kvxfer.telemetry.trace import Trace, now_ns
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.worker.engine import Engine
from kvxfer.worker.rank_transfer import Growth
from kvxfer.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

ACK_TIMEOUT_S = 5.0
REPEAT_S = 1.0
"""Pause before an update is sent again to those that have not acknowledged it."""
RETRY_S = 0.5
"""Pause after a growth that failed: memory may come back, and asking costs time and a log line."""

Publish = Callable[[RegionsUpdate], None]
Laggards = Callable[[int], list[str]]
"""Keys of the ready peers that have not yet acknowledged a generation."""


class GrowthState(enum.Enum):
    IDLE = enum.auto()
    COMMITTING = enum.auto()
    PUBLISHING = enum.auto()


class CacheGrowth:
    """Raises the pools' bounds; `regions` and `descriptions`, by rank, are what Hello tells."""

    def __init__(self, engine: Engine, transfer: TransferThread, trace: Trace) -> None:
        self._engine = engine
        self._transfer = transfer
        self._trace = trace
        self._state = GrowthState.IDLE
        self._pending: Growth | None = None
        self._update: RegionsUpdate | None = None
        self._repeat_at_s = 0.0
        self._started_ns = 0
        self._deadline_s = 0.0
        self._retry_at_s = 0.0
        """When a growth may be tried again after one that failed; 0 when none did."""
        self._is_paused = False
        self.problem = ""
        """Why the newest growth failed; '' where it did not."""
        self.seconds = Tally(GROWTH_S)
        """Of growths that came to their end."""
        self.num_failed = 0
        self.regions = RegionSet()
        self.epoch = 0
        """Counts revocations."""
        self.descriptions = [b""] * engine.size
        self.on_publish: Publish = lambda update: None
        self.on_settled: Callable[[], None] = lambda: None
        """Called when the bound was raised, and a while after a growth failed."""

    @property
    def pools(self) -> BlockPools:
        return self._engine.pools

    @property
    def is_idle(self) -> bool:
        return self._state is GrowthState.IDLE

    def pause(self) -> None:
        """Start no growth until `resume`: the cache is about to lose memory, or sleeps."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.on_settled()

    def withdraw(self, regions: Sequence[Region], descriptions: Sequence[bytes]) -> None:
        """`regions` are registered no more; `descriptions` are of those which are."""
        self.regions = self.regions.remove(regions)
        self.epoch += 1
        self.descriptions = list(descriptions)

    def restore(self) -> None:
        """Wake the cache if it sleeps, and register and publish what is not registered. Must be
        idle; `problem` says how it ended."""
        assert self.is_idle
        self._start(list(self._engine.cache.committed_blocks))

    def request_for(self, num_blocks: Sequence[int]) -> None:
        """Grow so that so many blocks of each group can be allocated; as `request`."""
        lacking = zip(self.pools.num_blocks, self.pools.missing(num_blocks), strict=True)
        self.request([bound + missing for bound, missing in lacking])

    def request(self, num_blocks: Sequence[int]) -> None:
        """Grow to at least `num_blocks` of each group or as far as the budget allows, unless a
        growth is under way or failed just now (`on_settled` says when to ask again)."""
        if self._is_paused or not self.is_idle or self._retry_at_s:
            return
        engine, usable = self._engine, self.pools.num_blocks
        target = engine.budget.clip(num_blocks, usable, engine.floors)
        if target == usable:
            return
        if self.regions.generation:  # the first extension is exact: the start decided it
            now = engine.affordable()
            affordable = now.clip(target, usable, usable)
            if affordable != target:
                text = f"{target} blocks are wanted, free memory now pays for {affordable}"
                self._failed(CacheError(text))
                return
            steps = [
                next_growth(group, old, new, group.capacity_blocks) if new > old else old
                for group, old, new in zip(now.geometry.groups, usable, target, strict=True)
            ]
            target = now.clip(engine.budget.clip(steps, usable, engine.floors), target, target)
        self._start(target)

    def _start(self, target: list[int]) -> None:
        self.problem = ""
        self._state = GrowthState.COMMITTING
        self._started_ns = now_ns()
        self._transfer.grow(target, self._committed, self._failed)

    def _committed(self, growth: Growth) -> None:
        self.regions = self.regions.add(growth.regions)
        self.descriptions = list(growth.descriptions)
        self._pending = growth
        self._state = GrowthState.PUBLISHING
        self._deadline_s = time.monotonic() + ACK_TIMEOUT_S
        extension = growth.extension
        self._trace.event(
            "generation",
            generation=self.regions.generation,
            started_ns=self._started_ns,
            old_blocks=self.pools.num_blocks,
            new_blocks=self._usable(extension.new_blocks),
            committed_bytes=self._engine.cache.committed_bytes,
            registered_bytes=self.regions.total_bytes,
        )
        added = list(growth.regions)
        told = list(growth.updates)
        self._update = RegionsUpdate(self.regions.generation, added, told, self.epoch)
        self._publish()

    def _publish(self) -> None:
        """To those that have not loaded it; again while it, or their word, may have been lost."""
        assert self._update is not None
        self._repeat_at_s = time.monotonic() + REPEAT_S
        self.on_publish(self._update)

    def _usable(self, backed: Sequence[int]) -> list[int]:
        """Of the blocks that whole granules happen to back those that the budget pays for."""
        engine = self._engine
        return engine.budget.clip(backed, self.pools.num_blocks, engine.floors)

    def _failed(self, error: KvxferError) -> None:
        logger.warning("growth failed, the cache stays as it is: %s", error)
        self.problem = str(error)
        self.num_failed += 1
        self._state = GrowthState.IDLE
        self._retry_at_s = time.monotonic() + RETRY_S

    def settle(self, laggards: Laggards, lose: Callable[[str, str], None]) -> None:
        """Finish publishing once every ready peer has acknowledged; lose those too late."""
        if self._retry_at_s and time.monotonic() >= self._retry_at_s:
            self._retry_at_s = 0.0
            self.on_settled()
        if self._state is not GrowthState.PUBLISHING or self._pending is None:
            return
        late = laggards(self.regions.generation)
        if late and time.monotonic() < self._deadline_s:
            if time.monotonic() >= self._repeat_at_s:
                self._publish()
            return
        new_blocks = self._pending.extension.new_blocks
        self._pending = None
        self._state = GrowthState.IDLE
        for key in late:
            lose(key, f"no acknowledgement of new regions within {ACK_TIMEOUT_S:g} s")
        self.pools.grow(self._usable(new_blocks))
        self.seconds.observe((now_ns() - self._started_ns) / 1e9)
        logger.info(
            "cache: %s blocks usable, %d bytes registered in %d regions, generation %d",
            self.pools.num_blocks,
            self.regions.total_bytes,
            len(self.regions.regions),
            self.regions.generation,
        )
        self.on_settled()
