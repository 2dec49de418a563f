"""The router: gives prompts to (prefill, decode) pairs of workers, which come and go. By ZMQ.

States of a prompt: see `kvxfer.serve.completion`; of a worker: `kvxfer.serve.backend`.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence

from kvxfer.control.auth import Keys
from kvxfer.control.cache_messages import CacheState, Defragment, Shrink, Sleep, WakeUp
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.messages import (
    Goodbye,
    Heartbeat,
    Message,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Welcome,
)
from kvxfer.control.resync_messages import HelloWanted, RegionsAt
from kvxfer.control.router_messages import (
    Cancel,
    Drain,
    Finished,
    Generate,
    Sampling,
    Status,
    StatusQuery,
    Token,
)
from kvxfer.control.telemetry_messages import Metrics, MetricsQuery
from kvxfer.control.view_messages import View
from kvxfer.errors import DeadlineExceeded, HandshakeRejected, WorkerDied
from kvxfer.serve.backend import Backend, BackendState
from kvxfer.serve.completion import Completion
from kvxfer.serve.delivery import Delivery
from kvxfer.serve.fleet import Fleet
from kvxfer.serve.lives import Lives
from kvxfer.serve.scrapes import Scrape, Scrapes
from kvxfer.serve.views import ViewTable

logger = logging.getLogger(__name__)

MAX_NUM_WAITING = 1024
"""Prompts that wait here for a decode worker, unless told."""


class Router:
    """Dials workers, sends prompts, collects tokens. One thread; `poll` makes it move."""

    def __init__(
        self,
        peer_timeout_s: float = 5.0,
        *,
        survives_loss: bool = False,
        request_timeout_s: float = math.inf,
        keys: Keys | None = None,
        max_num_waiting: int = MAX_NUM_WAITING,
    ) -> None:
        """A worker that is lost raises WorkerDied, or, if the router `survives_loss`, is waited
        for: its prompts go to another decode worker, or fail where tokens of theirs were told."""
        self._channel = Channel(f"router.{secrets.token_hex(8)}", keys=keys)
        self._fleet = Fleet(self._channel, peer_timeout_s, self._on_lost)
        self._backends = self._fleet.backends
        self._delivery = Delivery(self._fleet, max_num_waiting)
        self._survives_loss = survives_loss
        self._request_timeout_s = request_timeout_s
        self._statuses: dict[str, Status] = {}
        self._cache_states: dict[str, CacheState] = {}
        self.views = ViewTable()
        """Of workers, as far as `ask_views` asked."""
        self.lives = Lives()
        self.scrapes = Scrapes()
        self.num_misplaced = 0
        """Messages dropped that no router is sent."""

    # --- workers ------------------------------------------------------------------------------

    @property
    def backends(self) -> list[Backend]:
        """Those it knows; `facts` is None of those that are not there now."""
        return list(self._backends.values())

    @property
    def is_ready(self) -> bool:
        """Whether a prompt would be served now, as far as is known: a decode worker takes new ones
        and has met a prefill worker, and so has the router if it knows any."""
        decodes = self._fleet.taking("decode")
        knows_prefills = any(one.role == "prefill" for one in self._backends.values())
        has_prefill = not knows_prefills or bool(self._fleet.taking("prefill"))
        return has_prefill and any(one.status.get("peers") for one in decodes)

    def connect(self, addresses: Sequence[str], timeout_s: float) -> list[Backend]:
        """Dial workers and wait until each has said who it is. Raises DeadlineExceeded."""
        backends = [self._fleet.dial(address) for address in addresses]
        deadline_s = time.monotonic() + timeout_s
        while missing := [backend for backend in backends if backend.facts is None]:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{missing[0].address}: no answer to Hello")
            self.poll(0.05)
        return backends

    def add(self, address: str, role: str = "") -> Backend:
        """Dial a worker, which may start later; at once. From then on decode workers are told of
        all prefill workers here, and dial the same addresses. `role`: 'prefill' where it is known
        to be one, so that decode workers need not wait until it answered. Raises UsageError for
        what is no address, and changes nothing."""
        return self._fleet.add(address, role)

    def drain(self, worker: str, reason: str = "it was told to drain") -> Backend:
        """Have a worker (its id, or its address) take nothing new, finish and end; at once. Nothing
        more is given to it, and it is gone from `backends` when it has left: `is_drained` then.
        Raises UsageError for one that is not known."""
        return self._fleet.drain(worker, reason)

    def remove(self, worker: str, reason: str = "it was removed") -> Backend:
        """Forget a worker, which goes on; its prompts begin again elsewhere, or end. Raises
        UsageError for one that is not known."""
        return self._fleet.remove(worker, reason)

    def fds(self) -> list[int]:
        """See `Channel.fds`."""
        return self._channel.fds()

    def is_readable(self) -> bool:
        """Whether `poll(0)` would find something now."""
        return self._channel.is_readable()

    def status(self, backend: Backend, timeout_s: float = 5.0) -> Status:
        """A worker's numbers, asked for now. Raises DeadlineExceeded."""
        self._statuses.pop(backend.key, None)
        self._channel.send(backend.key, StatusQuery())
        deadline_s = time.monotonic() + timeout_s
        while backend.key not in self._statuses:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{backend.key}: no answer to StatusQuery")
            self.poll(0.005)
        return self._statuses[backend.key]

    def ask_metrics(self) -> Scrape:
        """Have each worker tell its metrics; those that cannot be reached count as failed."""
        scrape = Scrape({one.key: one.facts for one in self.backends if one.facts is not None})
        for backend in self.backends:
            if backend.key in scrape.missing and not self._fleet.send(backend, MetricsQuery()):
                scrape.failed(backend.key)
        self.scrapes.add(scrape)
        return scrape

    def manage(
        self, backend: Backend, request: Shrink | Sleep | WakeUp | Defragment, timeout_s: float
    ) -> CacheState:
        """What a worker's cache became. Raises DeadlineExceeded; the worker goes on with it."""
        self._cache_states.pop(backend.key, None)
        self._channel.send(backend.key, request)
        deadline_s = time.monotonic() + timeout_s
        while backend.key not in self._cache_states:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{backend.key}: no answer to {type(request).__name__}")
            self.poll(0.005)
        return self._cache_states[backend.key]

    def ask_views(self) -> None:
        """Have each worker show itself, unless it is asked already: see `views` a little later."""
        for backend in self.backends:
            if backend.facts is not None and (query := self.views.query(backend.key)):
                self._fleet.send(backend, query)

    # --- prompts ------------------------------------------------------------------------------

    def submit(
        self,
        backend: Backend | None,
        tokens: list[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_token_ids: Sequence[int] = (),
        verify: bool = False,
        request_id: str = "",
        traceparent: str = "",
        prefill: str = "",
    ) -> Completion:
        """Send a prompt to a decode worker (or to the single process that it is compared with),
        which first asks the worker called `prefill`, if that is told; None: to the pair of workers
        that is likely to be quickest, and to another decode worker where that is overloaded. One
        too many has ended when this returns, as 'overloaded'."""
        request_id, sent_s = request_id or secrets.token_hex(8), time.monotonic()
        generate = Generate(
            request_id=request_id,
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            stop_token_ids=list(stop_token_ids),
            prefill=prefill,
            verify=verify,
            traceparent=traceparent,
        )
        deadline_s = sent_s + self._request_timeout_s
        completion = Completion(request_id, tokens, backend, sent_s, generate, deadline_s)
        completion.is_free = backend is None
        self.lives.add(completion)
        if backend is not None and not self._survives_loss:
            self._channel.send(backend.key, generate)
            self._delivery.completions[request_id] = completion
            return completion
        self._fleet.watches |= completion.is_free
        self._delivery.add(completion)
        return completion

    @property
    def num_waiting(self) -> int:
        """Prompts that no worker has."""
        return self._delivery.num_waiting

    def cancel(self, completion: Completion) -> None:
        """Idempotent; the end comes as a Finished with reason 'cancelled'."""
        backend = completion.backend
        if completion.finished is not None:
            return
        if completion.is_waiting or backend is None:
            self._delivery.drop(completion, "cancelled while no decode worker was ready")
        elif self._survives_loss or completion.is_free:
            self._fleet.send(backend, Cancel(completion.generate.request_id))
        else:
            self._channel.send(backend.key, Cancel(completion.generate.request_id))

    def poll(self, timeout_s: float) -> None:
        """Take in what arrived, stay alive towards the workers, notice those that died."""
        for letter in self._channel.poll(timeout_s):
            self._receive(letter)
        now = time.monotonic()
        self._fleet.tick(now)
        self._delivery.tick(now)

    def close(self) -> None:
        self._channel.close()

    # --- what workers say ---------------------------------------------------------------------

    def _lose(self, backend: Backend, reason: str) -> None:
        self._fleet.lose(backend, reason)

    def _on_lost(self, backend: Backend, reason: str) -> None:
        self.views.forget(backend.key)
        self.scrapes.lost(backend.key)
        if backend.key in self._backends:  # else it was to go
            if not self._survives_loss:
                raise WorkerDied(f"worker {backend.name}: {reason}")
            logger.warning("worker %s: %s", backend.name, reason)
        self._delivery.lost(backend, reason)

    def _receive(self, letter: Letter) -> None:
        message = letter.message
        backend = self._backends.get(letter.peer)
        if backend is None:
            return  # it was forgotten meanwhile
        self._fleet.heard(backend)
        match message:
            case Token() | Finished():
                self._delivery.progress(backend, message)
            case Welcome():
                self._fleet.welcomed(backend, message)
                self._delivery.settle_soon()
            case HelloWanted():
                self._fleet.lose(backend, "it does not know this router any more")
            case Status():
                self._statuses[letter.peer] = message
                self._delivery.estimates.told(backend, message.values)
                if message.values.get("is_draining"):
                    self._fleet.drains(backend, "it says so")
            case Metrics(text=text):
                self.scrapes.told(letter.peer, text)
            case View():
                self.views.took(letter.peer, message)
            case CacheState():
                self._cache_states[letter.peer] = message
            case Drain(reason=reason):
                self._fleet.drains(backend, reason)
            case Reject(field=name, ours=ours, theirs=theirs):
                self._rejected(backend, HandshakeRejected(name, ours, theirs))
            case Goodbye(reason=reason, is_quiet=is_quiet):
                if is_quiet:
                    self._fleet.send(backend, Goodbye("heard", is_quiet=False))
                self._fleet.lose(backend, f"it left: {reason}", left=True)
            case Heartbeat() | RegionsUpdate() | RegionsAck() | RegionsAt():
                pass
            case _:
                self._misplaced(letter.peer, message)

    def _rejected(self, backend: Backend, error: HandshakeRejected) -> None:
        """Of those that were added one may be wrong: the others go on."""
        if not self._fleet.announces:
            raise error
        logger.error("%s: %s; it is left alone", backend.address, error)
        self._fleet.forget(backend, BackendState.GONE, str(error))

    def _misplaced(self, key: str, message: Message) -> None:
        self.num_misplaced += 1
        if self.num_misplaced & (self.num_misplaced - 1) == 0:  # 1st, 2nd, 4th, ...
            logger.warning("dropped %s from %s: not for a router", type(message).__name__, key)
