"""What the bench asks of the worker that starts transfers, into or out of the other's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvxfer.bench.growth_cases import FIRST_BLOCK, PROBE_BLOCK, RING
from kvxfer.bench.growth_flow import Ended, Flow
from kvxfer.bench.growth_owner import PROBE, WRONG
from kvxfer.bench.transfer_fill import clear, fill
from kvxfer.control.lane_messages import LanePushed, LaneReady
from kvxfer.transfer.connector import Direction
from kvxfer.worker.lane_trial import trial_moves
from kvxfer.worker.transfer_thread import Movement

if TYPE_CHECKING:
    from kvxfer.bench.growth_end import GrowthEnd


class Mover:
    """Control thread only. All moments are seconds of CLOCK_MONOTONIC."""

    def __init__(self, end: GrowthEnd) -> None:
        self._end = end
        self._flow = Flow(RING, self._move_set, self._check_set, end.fail)
        self._seed = 0
        self._moments: dict[str, float] = {}
        verbs = (self.arm, self.report, self.begin_flow, self.end_flow)
        self.verbs: dict[str, Callable[..., None]] = {verb.__name__: verb for verb in verbs}

    def arm(self, seed: int) -> None:
        """Before the other's memory changes: a block to push to what is new, or to pull into."""
        self._seed = seed
        self._end.laps.take()
        self._moments = {}
        views, block = self._end.parts.engine.cache.views[0], [PROBE_BLOCK]
        done: list[None] = []

        def act() -> None:
            if self._end.is_source:
                fill(views, block, seed)
            else:
                clear(views, block)

        self._end.in_model(act, done.append)
        self._end.when(lambda: bool(done), lambda: None)

    def report(self) -> None:
        """Answered with laps, and moments of 'moved' and, where this end compared, 'verified'."""
        found = self._end.laps.take(), dict(self._moments)
        self._end.when(lambda: True, lambda: found)

    def begin_flow(self, num_before: int) -> None:
        """Have transfers in flight; answered when so many have landed."""
        self._flow.start()
        self._end.when(lambda: self._flow.num_landed >= num_before, lambda: None)

    def end_flow(self, num_after: int) -> None:
        """Answered with Moved, after so many more."""
        enough = self._flow.num_landed + num_after

        def is_over() -> bool:
            if self._flow.num_landed >= enough:
                self._flow.stop()
            return self._flow.is_over

        self._end.when(is_over, self._flow.result)

    def on_ready(self, key: str, ready: LaneReady) -> None:
        """A set was compared, right where it names a block, and may be written again; or there is
        new memory."""
        del key
        what, _, index = ready.trial_id.partition(" ")
        if what != PROBE:
            self._flow.checked(int(index), bool(ready.blocks))
        else:
            self._move([PROBE_BLOCK], ready.blocks, self._probe_moved)

    def _probe_moved(self, movement: Movement) -> None:
        if movement.error is not None:
            self._say(movement.error)
            return
        self._moments["moved"] = movement.end_ns / 1e9
        if self._end.is_source:
            self._say("")
        else:
            self._end.compare([PROBE_BLOCK], self._seed, self._compared)

    def _compared(self, is_right: bool) -> None:
        self._moments["verified"] = time.monotonic()
        self._say("" if is_right else WRONG)

    def _say(self, error: str) -> None:
        self._end.tell(LanePushed(PROBE, str(self._end.peer.lane), 0, 0, error))

    def _move_set(self, index: int, ended: Ended) -> None:
        count = self._end.transfer_blocks
        first = FIRST_BLOCK + index * count * self._end.is_source
        near = self._end.sets[0 if self._end.is_source else index]
        self._move(near, range(first, first + count), ended)

    def _check_set(self, index: int) -> None:
        if self._end.is_source:
            self._end.tell(LanePushed(f"set {index}", str(self._end.peer.lane), 0, 0, ""))
        else:
            self._end.compare_set(index, partial(self._flow.checked, index))

    def _move(self, near: Sequence[int], far: Sequence[int], ended: Ended) -> None:
        """As a worker moves a trial of lanes."""
        parts, peer = self._end.parts, self._end.peer
        assert peer.lane is not None, "a peer that is ready has one"
        pulls = peer.lane.direction is Direction.PULL
        tokens = len(near) * parts.engine.specs[0].block_size
        moves = trial_moves(parts, near, peer, far, tokens, from_peer=pulls)
        parts.transfer.move_ranks(peer.key, peer.lane, moves, ended)
