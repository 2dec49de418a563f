"""What the bench asks of the worker whose cache grows, shrinks and sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvxfer.bench.growth_cases import KEPT_BLOCK
from kvxfer.bench.growth_steps import Grown, Shrunk
from kvxfer.bench.transfer_fill import fill
from kvxfer.control.cache_messages import CacheState
from kvxfer.control.lane_messages import LanePushed, LaneReady
from kvxfer.errors import TransferError

if TYPE_CHECKING:
    from kvxfer.bench.growth_end import GrowthEnd

CHANGE_TIMEOUT_S = 30.0
KEPT_SEED = 3
PROBE = "probe"
WRONG = "the new block arrived with other contents"


class Owner:
    """Control thread only. All moments are seconds of CLOCK_MONOTONIC."""

    def __init__(self, end: GrowthEnd) -> None:
        self._end = end
        self._seed = 0
        self._probe = 0
        self._wanted = 0
        """Blocks that a growth under way is to come to."""
        self._bytes_before = 0
        self._moments: dict[str, float] = {}
        end.parts.growth.on_settled = self._on_settled
        verbs = (self.grow, self.wake, self.shrink, self.sleep, self.outlived)
        self.verbs: dict[str, Callable[..., None]] = {verb.__name__: verb for verb in verbs}

    def grow(self, num_blocks: int, seed: int) -> None:
        """Answered with Grown, when the last new block has been moved and compared; with `seed` 0
        none is: the answer comes when it may be."""
        growth = self._end.parts.growth
        self._expect(seed)
        self._wanted = num_blocks
        self._moments["begin"] = time.monotonic()
        growth.request([num_blocks])
        if growth.is_idle:
            raise TransferError(growth.problem or "the cache does not grow")

    def wake(self, seed: int) -> None:
        """As `grow`."""
        self._expect(seed)
        self._moments["begin"] = time.monotonic()
        self._end.parts.residency.wake_up(self._woken)

    def shrink(self, num_blocks: int) -> None:
        """Answered with Shrunk, when the memory is gone and what is left was compared."""
        self._begin_shrink()
        done = partial(self._shrunk, num_blocks)
        self._end.parts.residency.shrink([num_blocks], CHANGE_TIMEOUT_S, done)
        self._go_on()

    def sleep(self) -> None:
        self._begin_shrink()
        self._end.parts.residency.sleep(CHANGE_TIMEOUT_S, partial(self._shrunk, 0))
        self._go_on()

    def outlived(self) -> None:
        """Answered with how many blocks, of one, hold after sleep what they held before."""
        found: list[bool] = []
        self._end.compare([KEPT_BLOCK], KEPT_SEED, found.append)
        self._end.when(lambda: bool(found), lambda: int(found[0]))

    # --- the way up -----------------------------------------------------------------------------

    def _expect(self, seed: int) -> None:
        self._seed = seed
        self._end.laps.take()
        self._moments = {}
        self._bytes_before = self._end.parts.growth.regions.total_bytes
        self._end.when(lambda: "verified" in self._moments, self._grown)

    def _on_settled(self) -> None:
        """Of a growth, also of one that failed; of a wake-up before it is over."""
        parts = self._end.parts
        if parts.growth.problem:
            self._end.fail(parts.growth.problem)
        elif self._wanted and parts.engine.pools.num_blocks[0] >= self._wanted:
            self._wanted = 0
            self._usable()

    def _woken(self, state: CacheState) -> None:
        if state.problem:
            self._end.fail(state.problem)
        else:
            self._usable()

    def _usable(self) -> None:
        """Have the last block moved: from here if it is pulled, to here if it is pushed."""
        self._moments["usable"] = time.monotonic()
        if not self._seed:
            self._moments["written"] = self._moments["verified"] = self._moments["usable"]
            return
        engine = self._end.parts.engine
        self._probe, views = engine.pools.num_blocks[0] - 1, engine.cache.views[0]

        def written(_: object) -> None:
            self._moments["written"] = time.monotonic()
            self._end.tell(LaneReady(PROBE, [self._probe]))

        if self._end.is_source:
            self._end.in_model(lambda: fill(views, [self._probe], self._seed), written)
        else:
            written(None)

    def on_pushed(self, key: str, pushed: LanePushed) -> None:
        """What the mover was told may be moved was: a set of those in flight, or the new block."""
        del key
        what, _, index = pushed.trial_id.partition(" ")
        if what != PROBE:
            self._end.compare_set(int(index), partial(self._set_compared, pushed.trial_id))
        elif pushed.error:
            self._end.fail(pushed.error)
        elif self._end.is_source:  # the mover pulled it, and compared it
            self._verified(True)
        else:
            self._end.compare([self._probe], self._seed, self._verified)

    def _verified(self, is_right: bool) -> None:
        if is_right:
            self._moments["verified"] = time.monotonic()
        else:
            self._end.fail(WRONG)

    def _set_compared(self, trial_id: str, is_right: bool) -> None:
        self._end.tell(LaneReady(trial_id, [1] if is_right else []))

    def _grown(self) -> Grown:
        moments = self._moments
        return Grown(
            moments["begin"],
            moments["usable"],
            moments["written"],
            moments["verified"],
            self._end.parts.growth.regions.total_bytes - self._bytes_before,
            self._end.laps.take(),
        )

    # --- the way down ---------------------------------------------------------------------------

    def _begin_shrink(self) -> None:
        self._end.laps.take()
        self._moments = {"begin": time.monotonic()}
        self._end.when(lambda: "lost" in self._moments, self._gone)

    def _go_on(self) -> None:
        """A Shrink that comes as a message is looked at in the same turn of the control loop; what
        the bench asks for comes at the end of one, and the next might be a tick later."""
        self._end.parts.transfer.report(lambda: None)

    def _shrunk(self, num_blocks: int, state: CacheState) -> None:
        self._moments["end"] = time.monotonic()
        if state.problem or state.num_blocks[0] != num_blocks:
            left = f"{state.num_blocks[0]} blocks are left, not {num_blocks}"
            self._end.fail(state.problem or left)
        elif num_blocks:
            self._end.compare([KEPT_BLOCK], KEPT_SEED, self._kept)
        else:
            self._kept(True)

    def _kept(self, is_right: bool) -> None:
        self._moments["lost"] = not is_right

    def _gone(self) -> Shrunk:
        begin_s, end_s, lost = (self._moments[name] for name in ("begin", "end", "lost"))
        return Shrunk(begin_s, end_s, int(lost), self._end.laps.take())
