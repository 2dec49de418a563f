"""Trials of lanes, the source's part: a pattern to be pulled, and pushes of it when asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvxfer.control.lane_messages import LaneChosen, LanePush, LanePushed, LaneReady, LaneTrial
from kvxfer.control.session import Peer
from kvxfer.errors import KvxferError, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lane_costs import LaneSamples
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.rank_plans import RankMove
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.lane_trial import (
    LONG_NS,
    NUM_TRANSFERS,
    first_group,
    trial_moves,
    trial_seed,
    why_not,
)
from kvxfer.worker.transfer_thread import Movement

logger = logging.getLogger(__name__)


@dataclass
class _Trial:
    message: LaneTrial
    blocks: list[list[int]]
    """Of ours, group by group: only the first has any."""
    samples: LaneSamples = field(default_factory=LaneSamples)
    """Of our pushes."""
    moves_in_flight: int = 0
    is_over: bool = False


class LaneTrialServer:
    """Control thread only. A trial ends with LaneChosen, with its peer, or with a newer trial; its
    blocks are given back once no transfer of ours reads them."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._trials: dict[str, _Trial] = {}
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            LaneTrial: self._on_trial,
            LanePush: self._on_push,
            LaneChosen: self._on_chosen,
        }

    @property
    def is_active(self) -> bool:
        return bool(self._trials)

    def _on_trial(self, key: str, message: LaneTrial) -> None:
        peer = self._parts.peers.require_met(key)
        assert peer.facts is not None
        geometry = first_group(self._parts)
        wrong = why_not(geometry, peer.facts.geometry.groups[0], message)
        if wrong:
            raise WireError(f"LaneTrial: {wrong}")
        self.lost(peer)
        pools = self._parts.engine.pools
        needed = [0] * len(self._parts.engine.specs)
        needed[0] = message.num_tokens // geometry.spec.block_size
        is_pushing = key in self._trials  # for the trial before, on a slow lane
        if is_pushing or self._parts.residency.refusal or not pools.can_allocate(needed):
            self._parts.peers.send(key, LaneReady(message.trial_id, []))
            return
        trial = _Trial(message, pools.allocate(needed))
        trial.blocks[0].reverse()  # else neighbours are joined to long runs, as in no real transfer
        self._trials[key] = trial
        write = self._parts.engine.transfer.write_pattern
        trial.moves_in_flight += 1

        def written(_: object) -> None:
            self._moved(key, trial)
            self._parts.peers.send(key, LaneReady(message.trial_id, trial.blocks[0]))

        def failed(error: KvxferError) -> None:
            self._moved(key, trial)
            self._parts.peers.lose(key, f"no pattern for a lane trial: {error}")

        self._parts.transfer.submit(
            lambda: write(trial.blocks[0], trial_seed(message.trial_id)),
            written,
            failed,
        )

    def _on_push(self, key: str, message: LanePush) -> None:
        trial = self._trials.get(key)
        if trial is None or trial.message.trial_id != message.trial_id:
            raise WireError("LanePush for no trial of this peer")
        peer = self._parts.peers.require_met(key)
        lane = Lane.parse(message.lane)
        if lane.direction is not Direction.PUSH or lane not in peer.lanes:
            raise WireError(f"LanePush by {lane}, which is no lane of this pair")
        tokens = message.num_tokens
        if not 0 < tokens <= trial.message.num_tokens:
            raise WireError(f"LanePush of {tokens} of {trial.message.num_tokens} tokens")
        try:
            moves = trial_moves(self._parts, trial.blocks[0], peer, trial.message.blocks, tokens)
        except KvxferError as error:
            self._answer(key, message, 0, str(error))
            return
        self._push(key, trial, message, lane, moves, [])

    def _push(
        self,
        key: str,
        trial: _Trial,
        message: LanePush,
        lane: Lane,
        moves: list[RankMove],
        times_ns: list[int],
    ) -> None:
        def ended(movement: Movement) -> None:
            self._moved(key, trial)
            times_ns.append(movement.elapsed_ns)
            if not movement.error:
                trial.samples.add(lane, *movement.measured)
            is_last = len(times_ns) == NUM_TRANSFERS or times_ns[-1] > LONG_NS
            if movement.error or is_last:
                self._answer(key, message, min(times_ns), movement.error or "")
            elif not trial.is_over:
                self._push(key, trial, message, lane, moves, times_ns)

        trial.moves_in_flight += 1
        self._parts.transfer.move_ranks(key, lane, moves, ended)

    def _answer(self, key: str, message: LanePush, elapsed_ns: int, error: str) -> None:
        answer = LanePushed(message.trial_id, message.lane, elapsed_ns, error)
        self._parts.peers.send(key, answer)

    def _on_chosen(self, key: str, chosen: LaneChosen) -> None:
        peer = self._parts.peers.require_met(key)
        lane = Lane.parse(chosen.lane)
        proven = [Lane.parse(one) for one in chosen.proven]
        for one in (lane, *proven):
            if one not in peer.lanes:
                raise WireError(f"LaneChosen {one}, which is no lane of this pair")
        trial = self._trials.get(key)
        is_this = trial is not None and trial.message.trial_id == chosen.trial_id
        costs = trial.samples.costs(proven) if trial is not None and is_this else {}
        self.lost(peer)
        self._parts.peers.settle(peer, lane, chosen.gbps, costs)

    def lost(self, peer: Peer) -> None:
        """The trial with this peer, if any, is over."""
        trial = self._trials.get(peer.key)
        if trial is not None:
            trial.is_over = True
            self._free_if_quiet(peer.key, trial)

    def _moved(self, key: str, trial: _Trial) -> None:
        trial.moves_in_flight -= 1
        self._free_if_quiet(key, trial)

    def _free_if_quiet(self, key: str, trial: _Trial) -> None:
        if trial.is_over and trial.moves_in_flight == 0:
            self._parts.engine.pools.free(trial.blocks)
            if self._trials.get(key) is trial:
                del self._trials[key]
