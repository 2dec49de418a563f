"""The decode worker: gets prompts from routers, their KV from prefill workers, and decodes."""

from __future__ import annotations

import logging
import time
from functools import partial

from decode.admission import Admission, overloaded, why_not
from decode.decoding import Decoding
from decode.lane_trials import LaneTrials
from decode.receiver import Receiver
from decode.schedule import AT_PREFILL, QUEUED, DecodeRequest, RequestState
from kvxfer.control.admission_messages import Busy, Starting
from kvxfer.control.messages import (
    Abort,
    Aborted,
    Cancel,
    Confirmed,
    Done,
    Failed,
    FirstToken,
    Generate,
    Ready,
)
from kvxfer.control.session import Peer
from kvxfer.errors import KvxferError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.digest import prompt_digests
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.integrity import Integrity
from kvxfer.worker.loop import Handler

logger = logging.getLogger(__name__)


LOOK_S = 0.02
"""Between two looks at all deadlines."""


class DecodeWorker:
    """The role's state machine; see `decode.schedule` for the states. Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        engine = parts.engine
        self._parts = parts
        self._requests: dict[str, DecodeRequest] = {}
        self._look_at_s = 0.0
        self._decoding = Decoding(parts, self._end)
        self._receiver = Receiver(
            engine.cache, parts.transfer, parts.peers, lambda: parts.growth.regions, parts.trace
        )
        self._receiver.on_failed = self._fail
        self._receiver.on_quiet = self._end_if_quiet
        self._integrity = Integrity(parts)
        self._admission = Admission(parts, self._receiver, self._integrity)
        self._lane_trials = LaneTrials(parts)
        self.handlers: dict[type, Handler] = {
            Generate: self._on_generate,
            Cancel: self._on_cancel,
            Starting: self._on_starting,
            Busy: self._on_busy,
            Ready: self._on_ready,
            FirstToken: self._on_first_token,
            Confirmed: self._on_confirmed,
            Done: self._on_done,
            Failed: self._on_failed,
            Aborted: self._on_aborted,
            **self._lane_trials.handlers,
        }
        parts.peers.on_met = self._lane_trials.begin
        parts.peers.on_ready = self._on_peer_ready
        parts.peers.on_lost = self._on_peer_lost
        parts.peers.on_fenced = self._on_fenced
        parts.peers.on_revoked = partial(self._receiver.revoked, self._requests.values())
        parts.growth.on_settled = self._admission.admit

    # --- the router's messages ----------------------------------------------------------------

    def _on_generate(self, key: str, generate: Generate) -> None:
        deadline_s = time.monotonic() + self._parts.options.request_timeout_s
        request = DecodeRequest(generate, key, deadline_s, specs=self._parts.engine.specs)
        problem = self._parts.residency.refusal or why_not(generate, self._parts.engine)
        if request.request_id in self._requests:
            problem = f"request_id: {request.request_id!r} is in use"
        if problem:
            self._finish(request, "error", problem)
            return
        if retry_after_s := self._admission.full_for_s():
            self._finish(*overloaded(request, "this decode worker's", retry_after_s))
            return
        self._requests[request.request_id] = request
        self._parts.trace.event("accepted", request=request.request_id)
        self._admission.add(request)

    def _on_cancel(self, key: str, cancel: Cancel) -> None:
        request = self._requests.get(cancel.request_id)
        if request is None or request.router != key:
            return
        request.is_cancelled = True
        if request.state in QUEUED or request.state is RequestState.GRANTED:
            self._give_up(request, "cancelled", "")

    # --- prefill's messages -------------------------------------------------------------------

    def _of(self, key: str, request_id: str, grant_id: str) -> DecodeRequest | None:
        """The request that gave this grant to this peer; None once it is over."""
        request = self._requests.get(request_id)
        if request is None or request.prefill is None or request.prefill.key != key:
            return None
        return request if request.grant_id == grant_id else None

    def _on_starting(self, key: str, starting: Starting) -> None:
        request = self._of(key, starting.request_id, starting.grant_id)
        if request is None:  # it is over, and prefill has not heard so
            over = Abort(starting.request_id, starting.grant_id, "it is over")
            self._parts.peers.send(key, over)
        else:
            self._admission.call(request)

    def _on_busy(self, key: str, busy: Busy) -> None:
        request = self._of(key, busy.request_id, busy.grant_id)
        if request is None:
            return
        request.writer_ended = True
        if request.state in AT_PREFILL:
            self._give_up(*overloaded(request, f"prefill worker {key}'s", busy.retry_after_s))
        else:
            self._end_if_quiet(request)

    def _on_ready(self, key: str, ready: Ready) -> None:
        request = self._of(key, ready.request_id, ready.lease.lease_id)
        if request is None or request.state is RequestState.ABORTING:
            return  # given up meanwhile; prefill is about to learn of it
        request.check_granted(Direction.PULL)
        try:
            self._receiver.read(request, ready)
        except KvxferError as error:
            self._fail(request, str(error))

    def _on_first_token(self, key: str, told: FirstToken) -> None:
        request = self._of(key, told.request_id, told.grant_id)
        if request is None or request.state is RequestState.ABORTING:
            return
        request.check_first_token(told.token, self._parts.engine.info.vocab_size)
        self._decoding.tell(request, told.token)

    def _on_confirmed(self, key: str, confirmed: Confirmed) -> None:
        request = self._of(key, confirmed.request_id, confirmed.lease_id)
        if request is None or request.state is RequestState.ABORTING:
            return self._writer_over(request)
        request.check_granted(Direction.PULL)
        self._receiver.prove_pulled(request, confirmed)
        return self._arrived(request, confirmed.digest)

    def _on_done(self, key: str, done: Done) -> None:
        request = self._of(key, done.request_id, done.grant_id)
        if request is None or request.state is RequestState.ABORTING:
            return self._writer_over(request)
        request.check_granted(Direction.PUSH)
        self._receiver.prove_pushed(request, done)
        return self._arrived(request, done.digest)

    def _on_failed(self, key: str, failed: Failed) -> None:
        request = self._of(key, failed.request_id, failed.grant_id)
        if request is not None and request.state in (*AT_PREFILL, RequestState.ABORTING):
            request.writer_ended = True
            self._fail(request, f"prefill: {failed.reason}")

    def _on_aborted(self, key: str, aborted: Aborted) -> None:
        request = self._of(key, aborted.request_id, aborted.grant_id)
        self._writer_over(request)
        if request is not None and request.state in AT_PREFILL:
            self._fail(request, "prefill gave it up unasked")

    def _writer_over(self, request: DecodeRequest | None) -> None:
        if request is not None:
            request.writer_ended = True
            self._end_if_quiet(request)

    # --- life cycle ---------------------------------------------------------------------------

    def _arrived(self, request: DecodeRequest, digest: int | None) -> None:
        """All of it is here; where a digest was asked for, it has to be that of what is here."""
        self._admission.forget(request)
        if not request.wants_digest:
            self._filled(request)
            return

        def compare(found: int) -> None:
            if found == digest:
                self._filled(request)
            else:
                self._fail(request, f"digest: KV of {found:#x} arrived, prefill had {digest}")

        assert request.prefill is not None and request.prefill.facts is not None
        theirs = request.prefill.facts.geometry.specs
        self._integrity.compute(
            request.prompt_blocks,
            request.num_prompt_tokens,
            theirs,
            compare,
            lambda error: self._fail(request, str(error)),
        )

    def _filled(self, request: DecodeRequest) -> None:
        """Only now do the blocks count as filled: digests first, before decode writes to them."""
        if not request.generate.verify or self._parts.engine.size > 1:
            self._decoding.join(request)
            return
        cache = self._parts.engine.cache
        self._parts.model.submit(
            partial(prompt_digests, cache, request.tables, request.num_prompt_tokens),
            partial(self._digested, request),
            lambda error: self._fail(request, str(error)),
        )

    def _digested(self, request: DecodeRequest, digests: list[str]) -> None:
        request.kv_digests = digests
        self._decoding.join(request)

    def _fail(self, request: DecodeRequest, reason: str) -> None:
        self._give_up(request, "error", reason)

    def _give_up(self, request: DecodeRequest, reason: str, error: str) -> None:
        """End a request that is not decoding yet; its blocks may have to wait in quarantine."""
        self._admission.forget(request)
        if request.state is RequestState.GRANTED and request.prefill is not None:
            request.state = RequestState.ABORTING
            self._parts.engine.pools.quarantine(request.blocks)
            self._finish(request, reason, error)
            if request.direction is Direction.PUSH and not request.writer_ended:
                self._abort(request, error or reason)
            self._end_if_quiet(request)  # a pull says Abort once its own reads have ended
        elif request.state is RequestState.ABORTING:
            self._end_if_quiet(request)
        elif request.state is not RequestState.ENDED:
            if request.state in AT_PREFILL and not request.writer_ended:
                self._abort(request, error or reason)
            self._end(request, reason, error)

    def _abort(self, request: DecodeRequest, reason: str) -> None:
        assert request.prefill is not None
        abort = Abort(request.request_id, request.grant_id, reason)
        self._parts.peers.send(request.prefill.key, abort)

    def _end_if_quiet(self, request: DecodeRequest) -> None:
        """An aborted request's blocks are free once nobody can write to them any more."""
        if request.state is not RequestState.ABORTING or request.reads_in_flight:
            return
        pulls = request.direction is Direction.PULL
        if not request.writer_ended and pulls:
            self._abort(request, "given up")
        if request.writer_ended or pulls:
            request.state = RequestState.ENDED
            self._parts.engine.pools.release_quarantined(request.blocks)
            del self._requests[request.request_id]
            self._admission.admit()

    def _end(self, request: DecodeRequest, reason: str, error: str) -> None:
        if request.blocks:
            self._parts.engine.pools.free(request.blocks)
        request.state = RequestState.ENDED
        del self._requests[request.request_id]
        self._finish(request, reason, error)
        self._admission.admit()

    def _finish(self, request: DecodeRequest, reason: str, error: str) -> None:
        if error and reason != "overloaded":
            logger.warning("request %s: %s", request.request_id, error)
        self._parts.peers.send(request.router, request.finished(reason, error))

    def _on_peer_ready(self, peer: Peer) -> None:
        """Ask again for the end of what was given up while there was no connection."""
        for request in self._requests.values():
            if request.state is RequestState.ABORTING and request.prefill is peer:
                self._abort(request, "given up")
        self._admission.admit()

    def _on_peer_lost(self, peer: Peer, reason: str) -> None:
        self._lane_trials.lost(peer)
        for request in list(self._requests.values()):
            if request.router == peer.key:
                request.is_cancelled = True
            given_up = request.state in QUEUED or request.state is RequestState.GRANTED
            if given_up and (request.prefill is peer or request.is_cancelled):
                self._fail(request, f"peer {peer.name} is lost: {reason}")

    def _on_fenced(self, worker_id: str) -> None:
        self._lane_trials.fenced(worker_id)
        for request in list(self._requests.values()):
            if request.prefill is not None and request.prefill.name == worker_id:
                self._writer_over(request)

    def tick(self) -> None:
        now, refusal = time.monotonic(), self._parts.residency.refusal
        is_due = now >= self._look_at_s
        if is_due:
            self._look_at_s = now + LOOK_S
        for request in list(self._requests.values()) if is_due else ():
            hopeless = request.why_hopeless(now, refusal)
            if hopeless:
                self._fail(request, hopeless)
        self._lane_trials.tick()
        self._parts.set_busy(bool(self._requests) or self._lane_trials.is_active)

    def status(self) -> dict[str, int | float | str]:
        queued = len(self._admission)
        return {**self._parts.status(), "requests": len(self._requests), "queued": queued}
