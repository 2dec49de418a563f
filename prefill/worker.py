"""The prefill worker: computes prompts for decode workers and hands their KV over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvxfer.cache.pools import reaches
from kvxfer.control.admission_messages import Busy, Granted, Starting
from kvxfer.control.messages import Abort, Aborted, Failed, FirstToken, PrefillRequest, Taken
from kvxfer.control.resync_messages import GrantQuery, GrantUnknown
from kvxfer.control.session import Peer
from kvxfer.errors import KvxferError, TransferError, WireError
from kvxfer.model.runner import SequenceStep
from kvxfer.transfer.connector import Direction
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.integrity import Integrity
from kvxfer.worker.loop import Handler
from kvxfer.worker.prefixes import make_prefix_cache, prefix_status
from prefill.admission import why_not, why_not_granted
from prefill.job import NOT_STARTED, JobState, PrefillJob
from prefill.lane_trials import LaneTrialServer
from prefill.last_words import LastWords
from prefill.schedule import PrefillScheduler
from prefill.sender import Sender
from prefill.streaming import LayerStreamer, Written

logger = logging.getLogger(__name__)


LOOK_S = 0.02
"""Between two looks at all deadlines."""


class PrefillWorker:
    """The role's state machine; see `prefill.job` for the states. Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        engine = parts.engine
        self._parts = parts
        self._jobs: dict[tuple[str, str], PrefillJob] = {}
        self._look_at_s = 0.0
        self._no_layers = [0] * len(engine.specs)
        self._all_layers = [spec.num_layers for spec in engine.specs]
        self._prefix_cache = make_prefix_cache(parts)
        self._scheduler = PrefillScheduler(
            engine.pools,
            parts.options.max_num_batched_tokens,
            engine.specs,
            self._prefix_cache,
            parts.options.max_num_queued_seqs,
        )
        self._sender = Sender(
            engine.cache,
            parts.transfer,
            parts.peers,
            lambda: parts.growth.regions,
            parts.trace,
            self._settle,
        )
        self._last_words = LastWords(parts.peers)
        self._integrity = Integrity(parts)
        self._streamer = LayerStreamer(parts)
        self._lane_trials = LaneTrialServer(parts)
        self.handlers: dict[type, Handler] = {
            PrefillRequest: self._on_request,
            GrantQuery: self._on_query,
            Granted: self._on_granted,
            Taken: self._on_taken,
            Abort: self._on_abort,
            **self._lane_trials.handlers,
        }
        parts.peers.on_met = lambda peer: None  # decode leads the trials, and chooses
        parts.peers.on_lost = self._on_peer_lost
        parts.peers.on_revoked = self._on_revoked
        parts.growth.on_settled = self._pump

    # --- messages -----------------------------------------------------------------------------

    def _on_request(self, key: str, request: PrefillRequest) -> None:
        peer = self._parts.peers.require(key)
        job = PrefillJob(request, peer, time.monotonic() + request.grant.timeout_s)
        if (known := self._jobs.get(job.key)) is not None:
            if request.grant.blocks is not None:
                self._bind(known, request.grant.blocks, request.grant.num_cached_tokens)
            return
        if self._last_words.repeat(key, request.grant.grant_id):
            return  # a grant is used once; they ask again since they may not have been heard
        problem = self._parts.residency.refusal or why_not(request, peer, self._parts.engine)
        if problem:
            grant_id = request.grant.grant_id
            self._last_words.say(key, grant_id, Failed(request.request_id, grant_id, problem))
            return
        if retry_after_s := self._scheduler.busy_for_s(key):
            grant_id = request.grant.grant_id
            self._last_words.say(key, grant_id, Busy(request.request_id, grant_id, retry_after_s))
            return
        self._jobs[job.key] = job
        self._parts.trace.event("requested", request=request.request_id)
        self._scheduler.add(job)
        self._pump()

    def _on_granted(self, key: str, granted: Granted) -> None:
        job = self._jobs.get((key, granted.grant_id))
        if job is None:
            self._last_words.repeat(key, granted.grant_id)
        else:
            self._bind(job, granted.blocks, granted.num_cached_tokens)

    def _bind(self, job: PrefillJob, blocks: list[list[int]], num_cached: int) -> None:
        """Decode names its blocks: the same ones, however often it says so. Raises WireError."""
        if job.state is JobState.CALLED:
            if wrong := why_not_granted(job.peer, blocks, num_cached, len(job.request.tokens)):
                self._give_up(job, wrong)
                return
            job.bind(blocks, num_cached)
            self._pump()
        elif job.state is not JobState.ENDING and (blocks, num_cached) != (
            job.granted,
            job.handed_from,
        ):
            raise WireError(f"request {job.request.request_id}: blocks that nobody asked for")

    def _on_query(self, key: str, query: GrantQuery) -> None:
        self._parts.peers.require(key)
        job = self._jobs.get((key, query.grant_id))
        if job is None:
            if not self._last_words.repeat(key, query.grant_id):
                unknown = GrantUnknown(query.request_id, query.grant_id)
                self._parts.peers.send(key, unknown)
        elif job.state is JobState.CALLED:
            self._call(job)
        elif job.state is JobState.HANDING_OVER and job.direction is Direction.PULL:
            self._sender.offer_again(job, query, job.deadline_s - time.monotonic())

    def _on_taken(self, key: str, taken: Taken) -> None:
        job = self._jobs.get((key, taken.lease_id))
        if job is not None and job.direction is not Direction.PULL:
            raise WireError(f"request {taken.request_id}: Taken where we push")
        if job is None:
            if not self._last_words.repeat(key, taken.lease_id):
                logger.warning("%s took request %s, which is over", key, taken.request_id)
                broken = Failed(taken.request_id, taken.lease_id, "the lease was broken")
                self._last_words.say(key, taken.lease_id, broken)
            return
        if job.state is not JobState.HANDING_OVER:
            self._give_up(job, "taken before all was offered")
            return
        self._parts.trace.event("taken", request=taken.request_id)
        job.is_taken = True
        self._settle(job)

    def _on_abort(self, key: str, abort: Abort) -> None:
        job = self._jobs.get((key, abort.grant_id))
        if job is None:
            self._parts.peers.require_met(key)  # others ask somebody who was here before us
            aborted = Aborted(abort.request_id, abort.grant_id)
            self._last_words.add(key, abort.grant_id, aborted)  # its request may yet come
            self._parts.peers.send(key, aborted)
            return
        job.aborted = True
        self._give_up(job, abort.reason)

    def _on_peer_lost(self, peer: Peer, reason: str) -> None:
        self._lane_trials.lost(peer)
        for job in [job for job in self._jobs.values() if job.peer is peer]:
            self._give_up(job, f"{peer.name} is lost: {reason}")

    def _on_revoked(self, peer: Peer, lowest: list[int]) -> None:
        for job in [job for job in self._jobs.values() if job.peer is peer]:
            if job.granted and reaches(job.granted, lowest):
                self._give_up(job, f"{peer.name} revoked memory that it had granted")

    # --- work ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever can start, and have the blocks named for what comes after it."""
        self._compute()
        for job in self._scheduler.to_call():
            self._call(job)

    def _call(self, job: PrefillJob) -> None:
        starting = Starting(job.request.request_id, job.request.grant.grant_id)
        self._parts.peers.send(job.peer.key, starting)

    def _compute(self) -> None:
        found = self._scheduler.next_chunk()
        if found is None:
            if wanted := self._scheduler.wanted_blocks():
                self._parts.growth.request_for(wanted)
            return
        job, step = found
        job.chunk_running = True
        job.layers_sent = list(self._no_layers)
        self._parts.steps.submit(
            self._streamer.prefill(step, partial(self._layers_written, job, step)),
            partial(self._chunk_done, job, step),
            partial(self._chunk_failed, job),
        )
        if step.start == job.num_cached > 0:
            self._hand_over(job, range(job.num_cached), self._no_layers, self._all_layers)

    def _layers_written(self, job: PrefillJob, step: SequenceStep, written: Written) -> None:
        """Some layers of a chunk are there while later ones are computed."""
        if job.chunk_running and job.computed == step.start:
            tokens = range(step.start, step.start + len(step.tokens))
            sent, job.layers_sent = job.layers_sent, list(written)
            self._hand_over(job, tokens, sent, written)
            self._settle(job)

    def _hand_over(
        self, job: PrefillJob, tokens: range, sent: Sequence[int], written: Sequence[int]
    ) -> None:
        """Layers from `sent` up to `written`, group by group, of what decode lacks of `tokens`."""
        if job.state not in (JobState.COMPUTING, JobState.HANDING_OVER):
            return
        layers = [range(*ends) for ends in zip(sent, written, strict=True)]
        tokens = range(max(tokens.start, job.handed_from), tokens.stop)
        if not any(layers) or not tokens:
            return
        try:
            self._sender.hand_over(job, tokens, layers, job.deadline_s - time.monotonic())
        except TransferError as error:  # a peer that is lost on the way may end this worker
            self._give_up(job, str(error))

    def _chunk_done(self, job: PrefillJob, step: SequenceStep, token: int | None) -> None:
        tokens, sent = self._scheduler.finish_chunk(job, step, token), job.layers_sent
        if job.state is JobState.HANDING_OVER:
            self._parts.trace.event("computed", request=job.request.request_id)
            self._tell_first_token(job)
        self._pump()  # before what follows: the model need not wait for that
        if job.state is JobState.HANDING_OVER and job.request.wants_digest:
            self._start_digest(job)
        self._hand_over(job, tokens, sent, self._all_layers)
        self._settle(job)

    def _tell_first_token(self, job: PrefillJob) -> None:
        """Ahead of the last KV: whoever waits for it need not wait for that, too."""
        assert job.first_token is not None
        told = FirstToken(job.request.request_id, job.request.grant.grant_id, job.first_token)
        self._parts.peers.send(job.peer.key, told)

    def _start_digest(self, job: PrefillJob) -> None:
        assert job.peer.facts is not None
        job.digest_running = True

        def done(digest: int) -> None:
            job.digest, job.digest_running = digest, False
            self._settle(job)

        def failed(error: KvxferError) -> None:
            job.digest_running = False
            self._give_up(job, str(error))

        theirs = job.peer.facts.geometry.specs
        self._integrity.compute(self._sender.kept(job), job.handed_over, theirs, done, failed)

    def _chunk_failed(self, job: PrefillJob, error: KvxferError) -> None:
        job.chunk_running = False
        self._give_up(job, str(error))
        self._pump()

    def _give_up(self, job: PrefillJob, reason: str) -> None:
        if job.state is JobState.ENDED:
            return
        self._scheduler.remove(job)
        job.failure = job.failure or reason
        job.state = JobState.ENDING
        self._settle(job)

    def _settle(self, job: PrefillJob) -> None:
        """End a job once nothing of it is under way any more."""
        if job.failure and job.state in (JobState.COMPUTING, JobState.HANDING_OVER):
            self._scheduler.remove(job)
            job.state = JobState.ENDING
        if not job.is_quiet:
            return
        ids = job.request.request_id, job.request.grant.grant_id
        if job.state is JobState.ENDING:
            message: Any = Aborted(*ids) if job.aborted else Failed(*ids, job.failure)
            logger.warning("request %s: %s", ids[0], job.failure)
            self._end(job)
            self._last_words.say(job.peer.key, ids[1], message)
        elif job.state is JobState.HANDING_OVER and (job.is_taken or job.is_pushed):
            word = self._sender.complete(job)
            self._end(job)
            self._last_words.say(job.peer.key, ids[1], word)

    def _end(self, job: PrefillJob) -> None:
        """Idempotent: telling decode the end may lose it, and that gives up all of its jobs."""
        if job.state is JobState.ENDED:
            return
        job.state = JobState.ENDED
        del self._jobs[job.key]
        self._scheduler.finish(job)
        if job.blocks:
            self._parts.engine.pools.free(job.blocks)
        self._pump()

    def tick(self) -> None:
        now, refusal = time.monotonic(), self._parts.residency.refusal
        is_due = now >= self._look_at_s
        if is_due:
            self._look_at_s = now + LOOK_S
        for job in list(self._jobs.values()) if is_due else ():
            if job.state in NOT_STARTED and refusal:
                self._give_up(job, refusal)
            elif now > job.deadline_s and job.state is not JobState.ENDING:
                self._give_up(job, f"deadline passed in state {job.state.name}")
        self._parts.set_busy(bool(self._jobs) or self._lane_trials.is_active)

    def status(self) -> dict[str, int | float | str]:
        return {
            **self._parts.status(),
            "jobs": len(self._jobs),
            "queued": len(self._scheduler),
            **prefix_status(self._prefix_cache),
            "handing_over": sum(
                job.computed > 0 and job.state is not JobState.ENDED for job in self._jobs.values()
            ),
        }
