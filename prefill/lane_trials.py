"""Trials of lanes, the source's part: a pattern to be pulled, and pushes of it when asked."""

from __future__ import annotations

import logging
from collections import OrderedDict
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

MAX_REMEMBERED = 4096
"""Trials that are over: the oldest are forgotten, whose messages cannot be under way any more."""
OVER = "the trial is over"


@dataclass
class _Trial:
    message: LaneTrial
    blocks: list[list[int]]
    """Of ours, group by group: only the first has any."""
    samples: LaneSamples = field(default_factory=LaneSamples)
    """Of our pushes."""
    moves_in_flight: int = 0
    is_ready: bool = False
    """The blocks hold the pattern."""
    pushes: dict[tuple[str, int], LanePushed | None] = field(default_factory=dict)
    """Asked for, by lane and tokens, each done once: how it ended, None while it is under way."""
    is_over: bool = False


class LaneTrialServer:
    """Control thread only. A trial ends with LaneChosen, with its peer, or with a newer trial; its
    blocks are given back once no transfer of ours reads them. What is over, or was put off, is not
    begun again: a message of it that comes late must not have us write where others do now."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._trials: dict[str, _Trial] = {}
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        """By peer and trial."""
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
        if self._is_known(key, message):
            return
        self.lost(peer)
        pools = self._parts.engine.pools
        needed = [0] * len(self._parts.engine.specs)
        needed[0] = message.num_tokens // geometry.spec.block_size
        is_pushing = key in self._trials  # for the trial before, on a slow lane
        if is_pushing or self._parts.residency.refusal or not pools.can_allocate(needed):
            self._never(key, message.trial_id)
            self._parts.peers.send(key, LaneReady(message.trial_id, []))
            return
        trial = _Trial(message, pools.allocate(needed))
        trial.blocks[0].reverse()  # else neighbours are joined to long runs, as in no real transfer
        self._trials[key] = trial
        write = self._parts.engine.transfer.write_pattern
        trial.moves_in_flight += 1

        def written(_: object) -> None:
            trial.is_ready = not trial.is_over
            self._moved(key, trial)
            self._is_known(key, message)

        def failed(error: KvxferError) -> None:
            self._moved(key, trial)
            self._parts.peers.lose(key, f"no pattern for a lane trial: {error}")

        self._parts.transfer.submit(
            lambda: write(trial.blocks[0], trial_seed(message.trial_id)),
            written,
            failed,
        )

    def _is_known(self, key: str, message: LaneTrial) -> bool:
        """Whether a trial was begun, or put off; then what is known of it is told again."""
        trial, trial_id = self._trials.get(key), message.trial_id
        if (key, trial_id) in self._over:
            self._parts.peers.send(key, LaneReady(trial_id, []))
            return True
        is_this = trial is not None and trial.message.trial_id == trial_id
        if trial is not None and is_this and trial.is_ready:
            self._parts.peers.send(key, LaneReady(trial_id, trial.blocks[0]))
        return is_this

    def _is_answered(self, key: str, message: LanePush) -> bool:
        """Whether a push was asked for before, or cannot be any more; it was answered then, or will
        be when it ends. Raises WireError where nobody spoke of its trial."""
        trial, what = self._trials.get(key), (message.lane, message.num_tokens)
        is_this = trial is not None and trial.message.trial_id == message.trial_id
        if trial is not None and is_this and what in trial.pushes:
            answer = trial.pushes[what]
            if answer is not None:
                self._parts.peers.send(key, answer)
            return True
        if (key, message.trial_id) in self._over:
            self._answer(key, trial if is_this else None, message, 0, OVER)
            return True
        if not is_this:
            raise WireError("LanePush for no trial of this peer")
        return False

    def _on_push(self, key: str, message: LanePush) -> None:
        if self._is_answered(key, message):
            return
        trial = self._trials[key]
        peer = self._parts.peers.require_met(key)
        lane = Lane.parse(message.lane)
        if lane.direction is not Direction.PUSH or lane not in peer.lanes:
            raise WireError(f"LanePush by {lane}, which is no lane of this pair")
        tokens = message.num_tokens
        if not 0 < tokens <= trial.message.num_tokens:
            raise WireError(f"LanePush of {tokens} of {trial.message.num_tokens} tokens")
        trial.pushes[message.lane, tokens] = None
        try:
            moves = trial_moves(self._parts, trial.blocks[0], peer, trial.message.blocks, tokens)
        except KvxferError as error:
            self._answer(key, trial, message, 0, str(error))
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
                self._answer(key, trial, message, min(times_ns), movement.error or "")
            elif trial.is_over:
                self._answer(key, trial, message, 0, OVER)
            else:
                self._push(key, trial, message, lane, moves, times_ns)

        trial.moves_in_flight += 1
        self._parts.transfer.move_ranks(key, lane, moves, ended)

    def _answer(
        self, key: str, trial: _Trial | None, message: LanePush, elapsed_ns: int, error: str
    ) -> None:
        """Nothing of this push is under way, nor will be; also to a peer that was lost meanwhile:
        should it live, its blocks wait for this."""
        what = message.lane, message.num_tokens
        answer = LanePushed(message.trial_id, *what, elapsed_ns, error)
        if trial is not None:
            trial.pushes[what] = answer
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
        if chosen.trial_id:
            self._never(key, chosen.trial_id)
        self._parts.peers.settle(peer, lane, chosen.gbps, costs)

    def lost(self, peer: Peer) -> None:
        """The trial with this peer, if any, is over."""
        trial = self._trials.get(peer.key)
        if trial is not None:
            trial.is_over = True
            self._never(peer.key, trial.message.trial_id)
            self._free_if_quiet(peer.key, trial)

    def _never(self, key: str, trial_id: str) -> None:
        """From now on nothing is begun of this trial."""
        self._over[key, trial_id] = None
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)

    def _moved(self, key: str, trial: _Trial) -> None:
        trial.moves_in_flight -= 1
        self._free_if_quiet(key, trial)

    def _free_if_quiet(self, key: str, trial: _Trial) -> None:
        if trial.is_over and trial.moves_in_flight == 0:
            self._parts.engine.pools.free(trial.blocks)
            if self._trials.get(key) is trial:
                del self._trials[key]
