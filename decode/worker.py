"""The decode worker: gets prompts from routers, their KV from prefill workers, and decodes."""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial

from decode.admission import Admission, overloaded, why_not
from decode.arrival import Arrival
from decode.attempts import next_attempt, why_nowhere
from decode.decoding import Decoding
from decode.lane_trials import LaneTrials
from decode.named_prefills import NamedPrefills
from decode.preemption import Preemption, later
from decode.prefixes import Prefixes
from decode.quarantine import Quarantine
from decode.receiver import Receiver
from decode.schedule import AT_PREFILL, QUEUED, DecodeRequest, RequestState
from kvxfer.control.admission_messages import Busy, Starting
from kvxfer.control.messages import Abort, Aborted, Confirmed, Done, Failed, FirstToken, Ready
from kvxfer.control.resync_messages import GrantUnknown
from kvxfer.control.router_messages import Cancel, Generate
from kvxfer.control.session import Peer
from kvxfer.errors import KvxferError
from kvxfer.telemetry.logs import about
from kvxfer.transfer.connector import Direction
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.draining import RETRY_S
from kvxfer.worker.loop import Handler
from kvxfer.worker.view import WorkerView

logger = logging.getLogger(__name__)


LOOK_S = 0.02
"""Between two looks at all deadlines."""


class DecodeWorker:
    """The role's state machine; see `decode.schedule` for the states. Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        engine = parts.engine
        self._parts = parts
        self._requests: dict[str, DecodeRequest] = {}
        self._arrivals = itertools.count()
        self._look_at_s = 0.0
        self._decoding = Decoding(parts, self._end)
        self._prefixes = prefixes = Prefixes(parts)
        self._receiver = Receiver(
            engine.cache,
            parts.transfer,
            parts.peers,
            lambda: parts.growth.regions,
            parts.trace,
            engine.pools.check_exclusive,
        )
        self._arrival = Arrival(
            parts, self._decoding.tell, self._decoding.join, self._fail, prefixes
        )
        self._admission = Admission(parts, self._receiver, self._arrival.wants_digest, prefixes)
        self._preemption = Preemption(parts, self._requests, self._admission)
        self._decoding.on_preempted = self._preemption.preempt
        self._quarantine = Quarantine(parts, self._admission.admit)
        self._receiver.on_failed = self._retry
        self._receiver.on_quiet = self._quarantine.end_if_quiet
        self._lane_trials = LaneTrials(parts)
        self._view = WorkerView("decode", parts, self._in_flight, self._num_requests)
        self._named = NamedPrefills(parts.peers, self._is_under_way)
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
            GrantUnknown: self._on_grant_unknown,
            **self._lane_trials.handlers,
            **self._view.handlers,
            **self._named.handlers,
        }
        parts.peers.on_met = self._lane_trials.begin
        parts.peers.on_ready = self._on_peer_ready
        parts.peers.on_lost = self._on_peer_lost
        parts.peers.on_fenced = self._on_fenced
        parts.peers.on_revoked = partial(self._receiver.revoked, self._requests.values())
        parts.growth.on_settled = self._admission.admit
        parts.metrics.load = self._load
        parts.metrics.prefix_tokens = prefixes.counts
        parts.metrics.num_preemptions = lambda: self._preemption.count

    # --- the router's messages ----------------------------------------------------------------

    def _on_generate(self, key: str, generate: Generate) -> None:
        deadline_s = time.monotonic() + self._parts.options.request_timeout_s
        request = DecodeRequest(generate, key, deadline_s, specs=self._parts.engine.specs)
        if never := why_not(generate, self._parts.engine):
            self._finish(request, "refused", never)
            return
        problem = self._parts.residency.refusal
        if request.request_id in self._requests:
            problem = f"request_id: {request.request_id!r} is in use"
        if problem:
            self._finish(request, "error", problem)
            return
        if reason := self._parts.draining.reason:
            request.retry_after_s = RETRY_S
            self._finish(request, "overloaded", f"this decode worker drains: {reason}")
            return
        if retry_after_s := self._admission.full_for_s():
            self._finish(*overloaded(request, "this decode worker's", retry_after_s))
            return
        request.arrival = next(self._arrivals)
        self._requests[request.request_id] = request
        self._view.trails.add(request.request_id, "", request)
        request.span = self._parts.spans.begin("decode", generate.traceparent, request.request_id)
        request.span.phase("queue")
        self._parts.trace.event("accepted", request=request.request_id)
        self._admission.add(request)

    def _on_cancel(self, key: str, cancel: Cancel) -> None:
        request = self._requests.get(cancel.request_id)
        if request is None or request.router != key:
            return
        request.is_cancelled = True
        if self._may_end(request):
            self._give_up(request, "cancelled", "")

    def _may_end(self, request: DecodeRequest) -> bool:
        """Whether it can end at once: else at the end of what is being computed for it."""
        begun = request.state in QUEUED or request.state is RequestState.GRANTED
        return begun or self._decoding.is_free(request)

    # --- prefill's messages -------------------------------------------------------------------

    def _of(self, key: str, request_id: str, grant_id: str) -> DecodeRequest | None:
        """The request that gave this grant to this peer; None once it is over."""
        request = self._quarantine.get(grant_id) or self._requests.get(request_id)
        peer = self._parts.peers.get(key)
        if request is None or peer is None or not request.is_at(peer):
            return None
        if (request.request_id, request.grant_id) != (request_id, grant_id):
            return None
        request.heard(time.monotonic())
        return request

    def _on_starting(self, key: str, starting: Starting) -> None:
        request = self._of(key, starting.request_id, starting.grant_id)
        if request is None:  # it is over, and prefill has not heard so
            over = Abort(starting.request_id, starting.grant_id, "it is over")
            self._parts.peers.send(key, over)
        elif request.state is RequestState.GRANTED:
            self._receiver.grant(request)  # it was not heard
        else:
            self._admission.call(request)

    def _on_busy(self, key: str, busy: Busy) -> None:
        request = self._of(key, busy.request_id, busy.grant_id)
        if request is None:
            return
        if request.state is RequestState.ABORTING:
            self._quarantine.writer_over(request)
        elif request.state in AT_PREFILL:
            request.writer_ended = True
            whose = f"prefill worker {request.prefill_name}'s"
            full = f"{whose} queue is full"
            if self._begin_again(request, full):
                return
            if request.num_resumed:
                self._replace(request, later(request, busy.retry_after_s), full)
            else:
                self._give_up(*overloaded(request, whose, busy.retry_after_s))

    def _on_ready(self, key: str, ready: Ready) -> None:
        request = self._of(key, ready.request_id, ready.lease.lease_id)
        if request is None or request.state is not RequestState.GRANTED:
            return  # given up meanwhile, and prefill is about to learn of it, or all was read
        request.check_granted(Direction.PULL)
        try:
            self._receiver.read(request, ready)
        except KvxferError as error:
            self._retry(request, str(error))

    def _on_first_token(self, key: str, told: FirstToken) -> None:
        request = self._of(key, told.request_id, told.grant_id)
        if request is not None and request.state is not RequestState.ABORTING:
            self._arrival.first_token(request, told.token)

    def _on_confirmed(self, key: str, confirmed: Confirmed) -> None:
        request = self._of(key, confirmed.request_id, confirmed.lease_id)
        self._on_word(request, confirmed, Direction.PULL)

    def _on_done(self, key: str, done: Done) -> None:
        self._on_word(self._of(key, done.request_id, done.grant_id), done, Direction.PUSH)

    def _on_word(
        self, request: DecodeRequest | None, word: Done | Confirmed, direction: Direction
    ) -> None:
        """All of it is here, says prefill: repeats change nothing."""
        if request is None or request.state in (RequestState.FILLED, RequestState.RUNNING):
            return
        if request.state is RequestState.ABORTING:
            self._quarantine.writer_over(request)
            return
        request.check_granted(direction)
        if isinstance(word, Done):
            self._receiver.prove_pushed(request, word)
        else:
            self._receiver.prove_pulled(request)
        request.writer_ended = True
        if self._arrival.first_token(request, word.first_token):
            self._receiver.filled(request)
            self._admission.filled(request)
            self._arrival.check(request, word.digest)

    def _on_failed(self, key: str, failed: Failed) -> None:
        request = self._of(key, failed.request_id, failed.grant_id)
        self._writer_gave_up(request, f"prefill: {failed.reason}")

    def _on_aborted(self, key: str, aborted: Aborted) -> None:
        request = self._of(key, aborted.request_id, aborted.grant_id)
        self._writer_gave_up(request, "prefill gave it up unasked")

    def _writer_gave_up(self, request: DecodeRequest | None, reason: str) -> None:
        if request is None:
            return
        if request.state is RequestState.ABORTING:
            self._quarantine.writer_over(request)
        elif request.state in AT_PREFILL:
            request.writer_ended = True
            self._retry(request, reason)

    def _on_grant_unknown(self, key: str, unknown: GrantUnknown) -> None:
        request = self._of(key, unknown.request_id, unknown.grant_id)
        if request is not None and request.state in AT_PREFILL:
            self._admission.ask_anew(request)

    # --- life cycle ---------------------------------------------------------------------------

    def _retry(self, request: DecodeRequest, reason: str) -> None:
        """This attempt failed: begin another one elsewhere, or fail."""
        if not self._begin_again(request, reason):
            self._fail(request, reason)

    def _begin_again(self, request: DecodeRequest, reason: str) -> bool:
        """Whether another prefill worker is left to try."""
        again = next_attempt(request, self._parts.peers.ready())
        if again is None:
            return False
        told = again.request_id, request.attempt, reason
        logger.warning("request %s: attempt %d: %s", *told, extra=about(again.request_id))
        self._parts.trace.event("retried", request=again.request_id, reason=reason)
        self._replace(request, again, reason)
        return True

    def _replace(self, request: DecodeRequest, again: DecodeRequest, reason: str) -> None:
        """Go on with `again`; what of `request` is still at prefill ends in quarantine."""
        self._requests[again.request_id] = again
        self._view.trails.add(again.request_id, "", again)
        again.span.phase("queue", **{"kvxfer.retried": reason})
        self._admission.forget(request)
        self._quarantine.add(request, reason)
        if again.state is not RequestState.ENDED:  # its router may have been lost meanwhile
            self._admission.add(again)

    def _fail(self, request: DecodeRequest, reason: str) -> None:
        self._give_up(request, "error", reason)

    def _give_up(self, request: DecodeRequest, reason: str, error: str) -> None:
        """End a request that is not decoding yet; its blocks may have to wait in quarantine."""
        self._admission.forget(request)
        if request.state in AT_PREFILL:
            del self._requests[request.request_id]
            self._finish(request, reason, error)
            self._quarantine.add(request, error or reason)
        elif request.state not in (RequestState.ABORTING, RequestState.ENDED):
            self._end(request, reason, error)

    def _end(self, request: DecodeRequest, reason: str, error: str) -> None:
        self._decoding.leave(request)
        self._admission.forget(request)
        if request.blocks:
            if not error:
                self._prefixes.keep_output(request)
            self._parts.engine.pools.free(request.blocks)
        request.state = RequestState.ENDED
        del self._requests[request.request_id]
        self._finish(request, reason, error)
        self._admission.admit()

    def _finish(self, request: DecodeRequest, reason: str, error: str) -> None:
        if error and reason != "overloaded":
            name = request.request_id
            logger.warning("request %s: %s", name, error, extra=about(name))
        self._parts.metrics.ended(reason)
        request.span.end(reason, error, **{"gen_ai.usage.completion_tokens": len(request.output)})
        self._parts.peers.send(request.router, request.finished(reason, error))

    def _on_peer_ready(self, peer: Peer) -> None:
        self._quarantine.peer_ready(peer)
        self._admission.admit()

    def _on_peer_lost(self, peer: Peer, reason: str) -> None:
        self._lane_trials.lost(peer)
        self._named.lost(peer)
        for request in list(self._requests.values()):
            if request.router == peer.key:
                request.is_cancelled = True
            lost = f"peer {peer.name} is lost: {reason}"
            if request.is_cancelled and self._may_end(request):
                self._fail(request, lost)
            elif request.prefill is peer and request.state in AT_PREFILL:
                self._retry(request, lost)

    def _on_fenced(self, worker_id: str) -> None:
        self._lane_trials.fenced(worker_id)
        self._quarantine.fenced(worker_id)

    def tick(self) -> None:
        self._decoding.tick()
        now = time.monotonic()
        if now >= self._look_at_s:
            self._look_at_s = now + LOOK_S
            self._look(now)
        self._quarantine.tick(now)
        self._lane_trials.tick()
        self._named.tick()
        self._parts.set_busy(self.is_busy)

    @property
    def is_serving(self) -> bool:
        return bool(self._requests)

    @property
    def is_busy(self) -> bool:
        return self.is_serving or bool(self._quarantine) or self._lane_trials.is_active

    def _is_under_way(self, peer: Peer) -> bool:
        """Whether something is, at this prefill worker."""
        asked = (one for one in self._requests.values() if one.state in AT_PREFILL)
        given_up = any(one.prefill_name == peer.name for one in self._quarantine)
        is_at = any(one.prefill is peer for one in asked)
        return is_at or given_up or self._lane_trials.involves(peer)

    def _look(self, now: float) -> None:
        """End what has waited too long, or for nothing, and ask about what was not heard of."""
        self._preemption.look(self._decoding.num_running > 0)
        refusal, ready = self._parts.residency.refusal, self._parts.peers.ready()
        for request in list(self._requests.values()):
            hopeless = request.why_hopeless(now, refusal) or why_nowhere(request, ready)
            if hopeless:
                self._fail(request, hopeless)
            elif request.state in AT_PREFILL and now >= request.ask_at_s:
                self._receiver.ask_again(request)

    def _in_flight(self) -> list[list[list[int]]]:
        granted = RequestState.GRANTED
        return [one.prompt_blocks for one in self._requests.values() if one.state is granted]

    def _num_requests(self) -> int:
        return len(self._requests) + len(self._quarantine)

    def _load(self) -> tuple[int, int]:
        waiting = len(self._admission)
        return len(self._requests) - waiting, waiting

    def status(self) -> dict[str, int | float | str]:
        running = self._decoding.num_running
        return {
            **self._parts.status(),
            "requests": self._num_requests(),
            "queued": len(self._admission),
            "queue_wait_s": self._admission.wait_s,
            "decode_tokens_per_s": self._decoding.pace.tokens_per_s,
            "running": running,
            "waiting": len(self._requests) - running,
            "preemptions": self._preemption.count,
            **self._prefixes.status(),
        }
