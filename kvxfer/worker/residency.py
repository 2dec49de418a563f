"""What of a worker's cache has memory: shrink, sleep, wake and defragment, seen from its control
thread.

| state     | what happens                                       | leaves by |
| ---       | ---                                                | --- |
| AWAKE     | memory comes and goes with `worker.growth`         | shrink, sleep, … → DRAINING |
| DRAINING  | growth paused, nothing granted above the new bound | nobody uses it → REVOKING; |
|           |                                                    | late: shrink what can be, |
|           |                                                    | all else → AWAKE |
| REVOKING  | bound lowered; peers drop the regions, and what    | all acknowledged or lost |
|           | their transports keep of them                      | → RELEASING |
| RELEASING | transfer thread: deregister, release or pack       | shrunk → AWAKE, slept → ASLEEP, |
|           |                                                    | packed or error → RESTORING |
| ASLEEP    | no memory; prompts are refused                     | wake_up → RESTORING |
| RESTORING | growth: commit, register, publish                  | done → AWAKE; error → as it was |

A block in use is one that a grant, lease, ticket or sequence touches: its owner holds it, or the
quarantine does. A peer that is lost may still reach what it knew (`worker.holders`): such memory
becomes a tombstone or, where the driver has none, stays mapped and counts as pinned by peers.

A revocation also begins a new agent epoch; the old agent ends when nobody uses it any more. When a
peer that had been lost comes back, nothing is revoked for that alone (RENEW): what the transport
kept of the lost connection goes with the old agent.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvxfer.control.cache_messages import (
    CacheState,
    Defragment,
    RegionsRevoke,
    Shrink,
    Sleep,
    WakeUp,
)
from kvxfer.errors import BlocksInUse, KvxferError
from kvxfer.telemetry.trace import Trace
from kvxfer.worker.cache_task import RENEW, Answer, CacheTask
from kvxfer.worker.engine import Engine
from kvxfer.worker.growth import CacheGrowth
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.ranked_transfer import NOT_RANKED
from kvxfer.worker.retired import Retired
from kvxfer.worker.revocation import Revocation
from kvxfer.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0
MOST_WEAR = 8
"""Connections that a transport may keep without use before peers meet a new agent."""
SLEEPS = "the cache sleeps"


class ResidencyState(enum.Enum):
    AWAKE = enum.auto()
    DRAINING = enum.auto()
    REVOKING = enum.auto()
    RELEASING = enum.auto()
    ASLEEP = enum.auto()
    RESTORING = enum.auto()


class Residency:
    """One request at a time; each is answered once. `settle` makes it move."""

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        growth: CacheGrowth,
        peers: PeerTable,
        trace: Trace,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._growth = growth
        self._peers = peers
        self._trace = trace
        self._task: CacheTask | None = None
        self._held: list[Callable[[], None]] = []
        """Requests that wait for the end of a RENEW, of which their senders know nothing."""
        self.retired = Retired(engine.cache, transfer, peers)
        self._revocation = Revocation(peers)
        self.state = ResidencyState.AWAKE
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            Shrink: lambda key, m: self.shrink(m.num_blocks, m.timeout_s, self._teller(key)),
            Sleep: lambda key, m: self.sleep(m.timeout_s, self._teller(key)),
            WakeUp: lambda key, m: self.wake_up(self._teller(key)),
            Defragment: lambda key, m: self.defragment(m.timeout_s, self._teller(key)),
            **self._revocation.handlers,
        }

    @property
    def epoch(self) -> int:
        """Counts revocations."""
        return self._growth.epoch

    @property
    def refusal(self) -> str:
        """Why no prompt is taken now, or ''."""
        going = self._task is not None and self._task.request in ("Sleep", "WakeUp")
        return SLEEPS if going or self.state is ResidencyState.ASLEEP else ""

    def shrink(self, num_blocks: Sequence[int], timeout_s: float, answer: Answer) -> None:
        """Give back what lies above `num_blocks` blocks of each group, in whole chunks."""
        task = CacheTask("Shrink", answer, list(num_blocks))
        groups = len(self._engine.specs)
        if len(num_blocks) != groups:
            task.problem = f"{task.num_blocks} blocks: the cache has {groups} groups"
        elif min(num_blocks) < 2:
            task.problem = f"{task.num_blocks} blocks: each group has the null block and one more"
        self._begin(task, timeout_s)

    def trim(self, answer: Answer) -> None:
        """Give back what nobody uses, now, but for what the cache began with."""
        bounds = zip(self._engine.pools.bounds_in_use(), self._engine.initial_blocks, strict=True)
        self.shrink([max(*pair) for pair in bounds], 0.0, answer)

    def sleep(self, timeout_s: float, answer: Answer) -> None:
        """Give all memory back."""
        self._begin(CacheTask("Sleep", answer), timeout_s)

    def defragment(self, timeout_s: float, answer: Answer) -> None:
        """Pack the memory. Needs it to be unused for the while, as if it went to sleep."""
        self._begin(CacheTask("Defragment", answer), timeout_s)

    def wake_up(self, answer: Answer) -> None:
        """Have as many blocks as before `sleep`; their contents are gone."""
        task = CacheTask("WakeUp", answer)
        if self.state is ResidencyState.AWAKE or (self._task and self._task.request == RENEW):
            task.problem = "the cache is awake"
        elif self._task is not None:
            task.problem = f"{self._task.request} is under way"
        if task.problem:
            self._tell(task)
            return
        self._task = task
        self._restore()

    def settle(self) -> None:
        """Whatever is due; called at every turn of the control loop."""
        self.retired.settle()
        task = self._task
        if task is None:
            if self._is_renewal_due():
                self._peers.holders.came_back.clear()
                self._begin(CacheTask(RENEW, lambda state: None), LONGEST_WAIT_S)
            return
        if self.state is ResidencyState.DRAINING and self._is_drained(task):
            self._describe(task)
        elif self.state is ResidencyState.REVOKING and self._revocation.has_ended():
            self._release(task)
        elif self.state is ResidencyState.RESTORING and self._growth.is_idle:
            asleep = self._engine.cache.is_asleep
            task.problem = task.problem or self._growth.problem
            self._end(task, ResidencyState.ASLEEP if asleep else ResidencyState.AWAKE)

    # --- the way down ---------------------------------------------------------------------------

    def _is_renewal_due(self) -> bool:
        """Whether the transport keeps what nobody uses: of peers that came back after they had been
        lost, or of many that could not be reached."""
        if self._transfer.wear < (1 if self._peers.holders.is_renewal_due() else MOST_WEAR):
            return False
        is_calm = self._peers.is_settled and self._growth.is_idle
        return is_calm and self.state is ResidencyState.AWAKE

    def _begin(self, task: CacheTask, timeout_s: float) -> None:
        if self._task is not None and self._task.request == RENEW:
            self._held.append(partial(self._begin, task, timeout_s))
            return
        if self._engine.size > 1 and task.request != RENEW:
            task.problem = NOT_RANKED
        elif self._task is not None:
            task.problem = f"{self._task.request} is under way"
        elif self.state is ResidencyState.ASLEEP:
            task.problem = SLEEPS
        elif not 0 <= timeout_s <= LONGEST_WAIT_S:
            task.problem = f"timeout_s: {timeout_s}: 0 to {LONGEST_WAIT_S:g} s"
        if task.problem:
            self._tell(task)
            return
        task.deadline_s = time.monotonic() + timeout_s
        self._task = task
        self.state = ResidencyState.DRAINING
        self._growth.pause()

    def _is_drained(self, task: CacheTask) -> bool:
        """Whether nobody uses what shall go. Ends the task when the deadline says so."""
        is_late = time.monotonic() >= task.deadline_s
        if not self._growth.is_idle:
            if is_late:
                task.problem = "the cache was growing"
                self._end(task, ResidencyState.AWAKE)
            return False
        if not task.limits:
            self._aim(task)
            self._engine.pools.withhold(task.limits)
        if task.request == "Shrink" and not task.regions:
            self._end(task, ResidencyState.AWAKE)
            return False
        try:
            self._engine.pools.check_unused(task.limits)
        except BlocksInUse as error:
            return is_late and self._make_do(task, error)
        return True

    def _aim(self, task: CacheTask) -> None:
        usable = self._engine.pools.num_blocks
        task.aim(self._engine.cache, usable, self._growth.regions)

    def _make_do(self, task: CacheTask, error: BlocksInUse) -> bool:
        """Too late: shrink as far as it goes; all else needs all of it."""
        task.problem = str(error)
        if task.request == "Shrink":
            bounds = zip(task.num_blocks, self._engine.pools.bounds_in_use(), strict=True)
            task.num_blocks = [max(*pair) for pair in bounds]
            self._aim(task)
            if task.regions:
                return True
        self._end(task, ResidencyState.AWAKE)
        return False

    def _describe(self, task: CacheTask) -> None:
        self.state = ResidencyState.REVOKING
        left = self._growth.regions.remove(task.regions).regions
        done, failed = partial(self._revoke, task), partial(self._failed, task)
        self._transfer.revoke(left, self.epoch + 1, done, failed)

    def _revoke(self, task: CacheTask, descriptions: list[bytes]) -> None:
        self._engine.pools.lower(task.limits)
        self.retired.add_epoch(self.epoch)
        self._growth.withdraw(task.regions, descriptions)
        self._revocation.begin(RegionsRevoke(self.epoch, list(task.regions), descriptions))

    def _release(self, task: CacheTask) -> None:
        if task.request == RENEW:
            self._end(task, ResidencyState.AWAKE)
            return
        self.state = ResidencyState.RELEASING
        release = partial(task.release, self._engine.cache, self._peers.holders.names())
        self._transfer.release(
            task.regions, release, partial(self._released, task), partial(self._failed, task)
        )

    def _released(self, task: CacheTask, _: object) -> None:
        if task.request == "Defragment":
            self._restore()
        else:
            asleep = task.request == "Sleep"
            self._end(task, ResidencyState.ASLEEP if asleep else ResidencyState.AWAKE)

    def _failed(self, task: CacheTask, error: KvxferError) -> None:
        """Have usable again what still has its memory."""
        task.problem = str(error)
        if task.request == RENEW:
            self._end(task, ResidencyState.AWAKE)
        else:
            self._restore()

    # --- the way up -----------------------------------------------------------------------------

    def _restore(self) -> None:
        self.state = ResidencyState.RESTORING
        self._growth.restore()

    def _end(self, task: CacheTask, state: ResidencyState) -> None:
        self._task = None
        self.state = state
        pools = self._engine.pools
        pools.withhold(pools.num_blocks)
        self._tell(task)
        if state is ResidencyState.AWAKE:
            self._growth.resume()
        held, self._held = self._held, []
        for begin in held:
            begin()

    def _tell(self, task: CacheTask) -> None:
        cache, num_blocks = self._engine.cache, self._engine.pools.num_blocks
        log = logger.warning if task.problem else logger.info
        log("cache: %s: %s; %s blocks usable", task.request, task.problem or "done", num_blocks)
        self._trace.event(
            "residency",
            request=task.request,
            problem=task.problem,
            committed_bytes=cache.committed_bytes,
            registered_bytes=self._growth.regions.total_bytes,
        )
        is_sleeping = self.state is ResidencyState.ASLEEP
        task.answer(
            CacheState(
                task.request,
                task.problem,
                is_sleeping,
                [0] * len(num_blocks) if is_sleeping else num_blocks,
                cache.committed_bytes,
                self.retired.tombstone_bytes,
                self.retired.pinned_bytes,
            )
        )

    def _teller(self, key: str) -> Answer:
        def tell(state: CacheState) -> None:
            self._peers.send(key, state)

        return tell
