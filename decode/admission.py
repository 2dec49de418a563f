"""Which prompts a decode worker takes, which prefill worker gets each, and when it gets blocks.

Blocks are bound late: a prompt queues at prefill without any, and gets them when prefill says that
it is about to start. The first few of a pair get theirs at once, so that nothing waits where
nothing queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized

from decode.prefixes import Prefixes
from decode.receiver import Receiver
from decode.schedule import AT_PREFILL, QUEUED, DecodeRequest, RequestState
from kvxfer.cache.footprint import blocks_needed
from kvxfer.control.router_messages import Generate
from kvxfer.control.session import Peer
from kvxfer.errors import UsageError
from kvxfer.model.sampling import SampleSpec
from kvxfer.worker.admission import GRANTS_AHEAD
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.engine import Engine
from kvxfer.worker.service_times import ServiceTimes

LONGEST_RETRY_S = 3600.0
"""A peer's estimate is a hint, not to be believed without bound."""
Requests = dict[str, DecodeRequest]
"""By id, in order of arrival."""


def why_not(generate: Generate, engine: Engine) -> str:
    """Why a prompt can never be served by this worker, in one line, or ''."""
    if not generate.tokens or generate.max_new_tokens < 1:
        return "prompt and max_new_tokens: at least one token each"
    if too_long := engine.why_too_long(len(generate.tokens), generate.max_new_tokens):
        return too_long
    if not 0 <= min(generate.tokens) <= max(generate.tokens) < engine.info.vocab_size:
        return f"prompt: a token is not in the vocabulary of {engine.info.vocab_size}"
    sampling = generate.sampling
    try:
        SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
    except UsageError as error:
        return str(error)
    return ""


def untried(request: DecodeRequest, ready: Sequence[Peer]) -> list[Peer]:
    """Prefill workers that no earlier attempt was given to."""
    return [peer for peer in ready if peer.key not in request.tried]


def choose_prefill(
    request: DecodeRequest, ready: Sequence[Peer], load: Mapping[str, Sized]
) -> Peer | None:
    """The ready prefill worker that `request` names, or else the untried one with the least `load`,
    by key; None when it is not there."""
    wanted = request.generate.prefill
    fitting = [peer for peer in untried(request, ready) if wanted in ("", peer.name)]
    return min(fitting, key=lambda peer: len(load.get(peer.key, ())), default=None)


def overloaded(
    request: DecodeRequest, whose: str, retry_after_s: float
) -> tuple[DecodeRequest, str, str]:
    """'Try later': the request, why it ends, and that in words."""
    request.retry_after_s = max(0.0, min(retry_after_s, LONGEST_RETRY_S))
    text = f"{whose} queue is full: try again in {request.retry_after_s:.3g} s"
    return request, "overloaded", text


class Admission:
    """Requests on their way to blocks. Control thread only."""

    def __init__(
        self,
        parts: WorkerParts,
        receiver: Receiver,
        wants_digest: Callable[[str], bool],
        prefixes: Prefixes,
    ) -> None:
        self._parts = parts
        self._receiver = receiver
        self._prefixes = prefixes
        self._wants_digest = wants_digest
        self._queued: dict[RequestState, Requests] = {state: {} for state in QUEUED}
        self._load: dict[str, Requests] = {}
        """By prefill worker, what was asked of it and is not filled yet."""
        self._service = ServiceTimes()

    def __len__(self) -> int:
        """Requests without blocks."""
        return sum(map(len, self._queued.values()))

    def full_for_s(self) -> float:
        """When to try again where the queue is full; 0: there is room."""
        limit = self._parts.options.max_num_queued_seqs
        return self._service.wait_s(len(self)) if len(self) >= limit else 0.0

    def add(self, request: DecodeRequest) -> None:
        self._queued[RequestState.WAITING][request.request_id] = request
        self.admit()

    def call(self, request: DecodeRequest) -> None:
        """Prefill is about to start it: a call that is repeated changes nothing."""
        if request.state is RequestState.ASKED:
            self._move(request, RequestState.CALLED)
            self.admit()

    def ask_anew(self, request: DecodeRequest) -> None:
        """Prefill has never heard of it, and so has not called it."""
        if request.state is RequestState.CALLED:
            self._move(request, RequestState.ASKED)
        self._receiver.ask_for(request)

    def forget(self, request: DecodeRequest) -> None:
        """It was filled, or has ended: prefill is free of it. Idempotent."""
        for requests in self._queued.values():
            if requests.get(request.request_id) is request:
                del requests[request.request_id]
        if request.prefill is not None:
            key = request.prefill.key
            load = self._load.get(key, {})
            load.pop(request.grant_id, None)
            if not load:
                self._load.pop(key, None)

    def admit(self) -> None:
        """Blocks to those that prefill has called, in that order, growing when they run low; the
        others ask, first come, first served."""
        for request in list(self._queued[RequestState.CALLED].values()):
            if request.state is RequestState.CALLED and not self._bind(request):
                break
        for request in list(self._queued[RequestState.WAITING].values()):
            ready = self._parts.peers.ready()  # asking for another one may have lost a peer
            if not ready:
                break
            peer = choose_prefill(request, ready, self._load)
            if request.state is RequestState.WAITING and peer is not None:
                self._ask(request, peer)  # else its prefill is not there: it holds up nobody

    def _bind(self, request: DecodeRequest) -> bool:
        """Whether there are blocks for it."""
        if not self._allocate(request):
            return False
        del self._queued[RequestState.CALLED][request.request_id]
        self._service.left(len(self))
        self._receiver.grant(request)
        return True

    def _ask(self, request: DecodeRequest, peer: Peer) -> None:
        load = self._load.get(peer.key, {})
        request.wants_digest = self._wants_digest(request.request_id)
        is_next = len(load) < GRANTS_AHEAD and not self._queued[RequestState.CALLED]
        if is_next and all(one.blocks for one in load.values()) and self._allocate(request):
            del self._queued[RequestState.WAITING][request.request_id]
            self._service.left(len(self))
        else:
            self._move(request, RequestState.ASKED)
        self._receiver.ask(request, peer)
        if request.state in AT_PREFILL:  # asking may have shown that the peer is lost
            self._load.setdefault(peer.key, {})[request.grant_id] = request

    def _allocate(self, request: DecodeRequest) -> bool:
        """Give it blocks, or grow where there are too few."""
        lengths = request.num_prompt_tokens, request.generate.max_new_tokens
        needed = blocks_needed(request.specs, *lengths, step_tokens=1)
        lacking = self._prefixes.allocate(request, needed)
        if lacking:
            self._parts.growth.request_for(lacking)
        return not lacking

    def _move(self, request: DecodeRequest, state: RequestState) -> None:
        del self._queued[request.state][request.request_id]
        self._queued[state][request.request_id] = request
        request.state = state
