"""Trials of lanes, the destination's part: it leads them, and chooses.

| step      | what happens                                            | leaves by |
| ---       | ---                                                     | --- |
| ASKED     | prefill prepares a pattern                              | LaneReady → TRYING |
| TRYING    | lane by lane: erase, transfer several times, check      | no lane left → chosen |

Every lane is tried with real bytes of both caches, since what differs is how their memory is
reached. A trial has a deadline; when it passes, what was measured by then decides. What prefill has
not answered is said again; blocks that it was asked to write to stay in quarantine until it does,
or is fenced, however the trial ended (`decode.trial`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from decode.trial import EndedTrials, Trial
from kvxfer.control.lane_messages import LaneChosen, LanePushed, LaneReady, LaneTrial
from kvxfer.control.session import Peer
from kvxfer.errors import HandshakeRejected, KvxferError, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane, best_of
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.lane_report import LaneReport
from kvxfer.worker.lane_trial import (
    LONG_NS,
    NUM_TRANSFERS,
    arrived_bytes,
    first_group,
    first_tokens,
    num_tokens,
    trial_moves,
    trial_seed,
    why_not,
)
from kvxfer.worker.transfer_thread import Movement

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 10.0
ASK_PAUSE_S = 1.0
"""Before a word to prefill that was not answered is said again."""


class LaneTrials:
    """Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._report = LaneReport(parts)
        self._trials: dict[str, Trial] = {}
        self._ended = EndedTrials(parts.engine.pools)
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            LaneReady: self._on_ready,
            LanePushed: self._on_pushed,
        }

    @property
    def is_active(self) -> bool:
        return bool(self._trials or self._ended)

    def involves(self, peer: Peer) -> bool:
        """Whether a trial with it goes on, or it may still write for one that is over."""
        return peer.key in self._trials or any(
            trial.peer_name == peer.name for trial in self._ended
        )

    def begin(self, peer: Peer) -> None:
        """Find the quickest lane; ends with `PeerTable.settle`, or without the peer."""
        assert peer.facts is not None
        lanes = [lane for lane in peer.lanes if self._is_reached(peer, lane)]
        ours, theirs = first_group(self._parts), peer.facts.geometry.groups[0]
        pools, device = self._parts.engine.pools, self._parts.engine.driver.device
        tokens = num_tokens(ours, theirs, pools.groups[0].num_free, device)
        if not lanes:
            self._parts.peers.lose(peer.key, "no connector of ours reaches it")
            return
        if tokens == 0 or self._parts.residency.refusal:
            self._choose_untried(peer, lanes[0], "no blocks are free here")
            return
        needed = [tokens // ours.spec.block_size, *[0] * (len(pools.groups) - 1)]
        deadline_s = time.monotonic() + TRIAL_TIMEOUT_S
        blocks, trial_id = pools.allocate(needed), secrets.token_hex(8)
        whose = peer, peer.name
        trial = Trial(*whose, trial_id, tokens, blocks, deadline_s, lanes, lanes[0])
        self._trials[peer.key] = trial
        self._ask(trial)

    def _is_reached(self, peer: Peer, lane: Lane) -> bool:
        return lane.direction is Direction.PUSH or lane.connector in peer.reached

    def _choose_untried(self, peer: Peer, lane: Lane, reason: str, trial_id: str = "") -> None:
        logger.info("lanes to %s were not tried: %s; using %s", peer.name, reason, lane)
        if self._parts.peers.send(peer.key, LaneChosen(trial_id, str(lane), 0.0, [])):
            self._parts.peers.settle(peer, lane, 0.0)

    def _ask(self, trial: Trial) -> None:
        """Say what has no answer yet, again if need be, to the worker that it is for."""
        message, peer = trial.unanswered, self._parts.peers.get(trial.peer.key)
        trial.ask_at_s = time.monotonic() + ASK_PAUSE_S
        is_there = peer is not None and peer.is_met and peer.name == trial.peer_name
        if message is not None and is_there:
            self._parts.peers.send(trial.peer.key, message)

    # --- messages -----------------------------------------------------------------------------

    def _of(self, key: str, trial_id: str) -> Trial | None:
        trial = self._trials.get(key)
        return trial if trial is not None and trial.trial_id == trial_id else None

    def _on_ready(self, key: str, ready: LaneReady) -> None:
        trial = self._of(key, ready.trial_id)
        if trial is None or trial.source:
            return
        if not ready.blocks:
            self._end(trial)
            reason = f"not now, says {trial.peer.name}"
            self._choose_untried(trial.peer, trial.fallback, reason, trial.trial_id)
            return
        assert trial.peer.facts is not None
        theirs, told = trial.peer.facts.geometry.groups[0], ready.blocks
        wrong = why_not(first_group(self._parts), theirs, LaneTrial("", trial.num_tokens, told))
        if wrong:
            raise WireError(f"LaneReady: {wrong}")
        trial.source = ready.blocks
        self.fenced(trial.peer.name)  # it takes no new trial while it pushes for an older one
        self._next(trial)

    def _on_pushed(self, key: str, pushed: LanePushed) -> None:
        for trial in [*self._trials.values(), *self._ended]:
            is_whose = trial.peer.key == key and trial.peer.name == trial.peer_name
            if is_whose and trial.is_answered_by(pushed):
                trial.is_written = False
                if trial.is_over:
                    self._ended.give_back()
                else:
                    self._moved(trial, max(pushed.elapsed_ns, 0), pushed.error)

    # --- lane by lane -------------------------------------------------------------------------

    def _next(self, trial: Trial) -> None:
        if not trial.lanes:
            self._choose(trial)
            return
        trial.lane = trial.lanes.pop(0)
        trial.times_ns = []
        assert trial.peer.facts is not None
        theirs = trial.peer.facts.geometry.groups[0]
        trial.tokens = first_tokens(first_group(self._parts), theirs, trial.num_tokens)
        erase = self._parts.engine.transfer.erase_pattern
        self._on_blocks(trial, erase, lambda _: self._move(trial))

    def _move(self, trial: Trial) -> None:
        lane, peer = trial.lane, trial.peer
        assert lane is not None
        if lane.direction is Direction.PUSH:
            trial.is_written = True
            self._ask(trial)
            return
        ends = self._parts, trial.blocks[0], peer, trial.source
        try:
            moves = trial_moves(*ends, trial.tokens, from_peer=True)
        except KvxferError as error:
            self._moved(trial, 0, str(error))
            return
        trial.work_in_flight += 1

        def ended(movement: Movement) -> None:
            trial.work_in_flight -= 1
            if not movement.error:
                trial.samples.add(lane, *movement.measured)
            if trial.is_over:
                self._ended.give_back()
            else:
                self._moved(trial, movement.elapsed_ns, movement.error or "")

        self._parts.transfer.move_ranks(peer.key, lane, moves, ended)

    def _moved(self, trial: Trial, elapsed_ns: int, error: str) -> None:
        lane = trial.lane
        assert lane is not None
        if error:
            trial.errors[lane] = error
            self._next(trial)
            return
        trial.times_ns.append(elapsed_ns)
        # A lane's first transfer may connect, map or compile, which says nothing of the next ones.
        is_again = lane.direction is Direction.PULL and elapsed_ns <= LONG_NS
        if is_again and len(trial.times_ns) < NUM_TRANSFERS:
            self._move(trial)
            return
        is_long = min(trial.times_ns) * trial.num_tokens > LONG_NS * trial.tokens
        if trial.tokens < trial.num_tokens and not is_long:
            trial.tokens, trial.times_ns = trial.num_tokens, []
            self._move(trial)
            return
        seed = trial_seed(trial.trial_id)
        check = partial(self._parts.engine.transfer.check_pattern, seed=seed)
        self._on_blocks(trial, check, partial(self._checked, trial, lane))

    def _checked(self, trial: Trial, lane: Lane, is_right: object) -> None:
        if is_right:
            num_bytes = arrived_bytes(self._parts, trial.tokens)
            trial.gbps[lane] = num_bytes / max(1, min(trial.times_ns))
        else:
            trial.errors[lane] = "it delivered wrong bytes"
        self._next(trial)

    def _on_blocks(
        self, trial: Trial, work: Callable[..., Any], done: Callable[[object], None]
    ) -> None:
        """Do `work` on blocks of ours, then `done` if the trial is still on."""
        trial.work_in_flight += 1

        def reported(result: object) -> None:
            trial.work_in_flight -= 1
            if trial.is_over:
                self._ended.give_back()
            else:
                done(result)

        def failed(error: KvxferError) -> None:
            reported(None)
            self._parts.peers.lose(trial.peer.key, f"lane trial: {error}")

        block_size = first_group(self._parts).spec.block_size
        blocks = trial.blocks[0][: trial.tokens // block_size]
        self._parts.transfer.submit(lambda: work(blocks), reported, failed)

    # --- the end ------------------------------------------------------------------------------

    def _choose(self, trial: Trial) -> None:
        peer = trial.peer
        for failed, error in trial.errors.items():
            logger.warning("lane %s to %s does not work: %s", failed, peer.name, error)
        lane = best_of(peer.lanes, trial.gbps)
        self._end(trial)
        if lane is None:
            reason = "; ".join(f"{one}: {error}" for one, error in trial.errors.items())
            self._parts.peers.lose(peer.key, f"no lane works: {reason or 'none was tried in time'}")
            return
        self._report.tell(peer, lane, trial.gbps, trial.tokens)
        gbps, least = trial.gbps[lane], self._parts.options.min_lane_gbps
        if gbps < least:
            slow = HandshakeRejected("min_lane_gbps", f"{least:g}", f"{gbps:.3g} by {lane}")
            self._parts.peers.greeting.refuse(peer, slow)
            return
        chosen = LaneChosen(trial.trial_id, str(lane), gbps, [str(one) for one in trial.gbps])
        if self._parts.peers.send(peer.key, chosen):
            self._parts.peers.settle(peer, lane, gbps, trial.samples.costs(trial.gbps))

    def tick(self) -> None:
        for trial in [*self._trials.values(), *self._ended]:
            if trial.pause_is_over:
                self._ask(trial)
        for trial in list(self._trials.values()):
            if time.monotonic() > trial.deadline_s:
                waits_for = f"lane {trial.lane}" if trial.lane else "the pattern"
                logger.warning("lane trial with %s: no end of %s", trial.peer.name, waits_for)
                if trial.gbps or trial.errors:
                    self._choose(trial)
                else:
                    self._end(trial)
                    reason = "none ended in time"
                    self._choose_untried(trial.peer, trial.fallback, reason, trial.trial_id)

    def lost(self, peer: Peer) -> None:
        trial = self._trials.get(peer.key)
        if trial is not None and trial.peer is peer:
            self._end(trial)

    def fenced(self, worker_id: str) -> None:
        """Nothing more will be written for trials of this worker that are over."""
        self._ended.fenced(worker_id)

    def _end(self, trial: Trial) -> None:
        del self._trials[trial.peer.key]
        self._ended.add(trial)
