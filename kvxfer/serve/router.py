"""The router: turns prompts into requests for (prefill, decode) pairs. Over ZMQ only, for now.

States of a prompt: see `kvxfer.serve.completion`.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Sequence

from kvxfer.control.auth import Keys
from kvxfer.control.cache_messages import CacheState, Defragment, Shrink, Sleep, WakeUp
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.messages import (
    WIRE_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Welcome,
)
from kvxfer.control.resync_messages import HelloWanted, RegionsAt
from kvxfer.control.router_messages import (
    Cancel,
    Finished,
    Generate,
    Sampling,
    Status,
    StatusQuery,
    Token,
)
from kvxfer.control.telemetry_messages import Metrics, MetricsQuery
from kvxfer.errors import ControlError, DeadlineExceeded, HandshakeRejected, WorkerDied
from kvxfer.serve.completion import MAX_ATTEMPTS, Backend, Completion
from kvxfer.serve.scrapes import Scrape, Scrapes

logger = logging.getLogger(__name__)

HELLO_RETRY_S = 1.0
HELLO_RETRY_MAX_S = 5.0
HEARTBEAT_S = 0.5


class Router:
    """Dials workers, sends prompts, collects tokens. One thread; `poll` makes it move."""

    def __init__(
        self,
        peer_timeout_s: float = 5.0,
        *,
        survives_loss: bool = False,
        request_timeout_s: float = math.inf,
        keys: Keys | None = None,
    ) -> None:
        """A worker that is lost raises WorkerDied, or, if the router `survives_loss`, is waited
        for: its prompts go to another decode worker, or fail where tokens of theirs were told."""
        self._channel = Channel(f"router.{secrets.token_hex(8)}", keys=keys)
        self._peer_timeout_s = peer_timeout_s
        self._survives_loss = survives_loss
        self._request_timeout_s = request_timeout_s
        self._backends: dict[str, Backend] = {}
        self._completions: dict[str, Completion] = {}
        self._statuses: dict[str, Status] = {}
        self._cache_states: dict[str, CacheState] = {}
        self._next_beat_s = 0.0
        self.scrapes = Scrapes()
        self.num_misplaced = 0
        """Messages dropped that no router is sent."""

    def connect(self, addresses: Sequence[str], timeout_s: float) -> list[Backend]:
        """Dial workers and wait until each has said who it is. Raises DeadlineExceeded."""
        backends = [Backend(self._channel.dial(address)) for address in addresses]
        self._backends.update({backend.key: backend for backend in backends})
        deadline_s = time.monotonic() + timeout_s
        while missing := [backend for backend in backends if backend.facts is None]:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{missing[0].key.removeprefix('out:')}: no answer to Hello")
            self.poll(0.05)
        return backends

    @property
    def backends(self) -> list[Backend]:
        """Those it dialled; `facts` is None of those that are not ready."""
        return list(self._backends.values())

    def fds(self) -> list[int]:
        """See `Channel.fds`."""
        return self._channel.fds()

    def is_readable(self) -> bool:
        """Whether `poll(0)` would find something now."""
        return self._channel.is_readable()

    def submit(
        self,
        backend: Backend,
        tokens: list[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_token_ids: Sequence[int] = (),
        verify: bool = False,
        request_id: str = "",
        traceparent: str = "",
    ) -> Completion:
        """Send a prompt to a decode worker (or to the single process that it is compared with)."""
        request_id, sent_s = request_id or secrets.token_hex(8), time.monotonic()
        generate = Generate(
            request_id=request_id,
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            stop_token_ids=list(stop_token_ids),
            prefill="",
            verify=verify,
            traceparent=traceparent,
        )
        deadline_s = sent_s + self._request_timeout_s
        completion = Completion(request_id, tokens, backend, sent_s, generate, deadline_s)
        if not self._survives_loss:
            self._channel.send(backend.key, generate)
        else:
            completion.is_waiting = True
        self._completions[request_id] = completion
        if completion.is_waiting:
            self._send_waiting(completion)
        return completion

    def cancel(self, completion: Completion) -> None:
        """Idempotent; the end comes as a Finished with reason 'cancelled'."""
        if completion.finished is not None:
            return
        if completion.is_waiting:
            self._drop(completion, "cancelled while no decode worker was ready")
        elif self._survives_loss:
            self._send_if_connected(completion.backend, Cancel(completion.generate.request_id))
        else:
            self._channel.send(completion.backend.key, Cancel(completion.generate.request_id))

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
            if backend.key in scrape.missing and not self._send_if_connected(
                backend, MetricsQuery()
            ):
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

    def poll(self, timeout_s: float) -> None:
        """Take in what arrived, stay alive towards the workers, notice those that died."""
        for letter in self._channel.poll(timeout_s):
            self._receive(letter)
        now = time.monotonic()
        for backend in self._backends.values():
            if backend.facts is None:
                self._greet(backend, now)
            elif now - backend.last_seen_s > self._peer_timeout_s:
                self._lose(backend, f"nothing heard for {self._peer_timeout_s:g} s")
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            for backend in self._backends.values():
                if backend.facts is not None:
                    self._send_if_connected(backend, Heartbeat())
        for completion in list(self._completions.values()):
            self._settle(completion, now)

    def _settle(self, completion: Completion, now: float) -> None:
        """Whatever is due for a prompt."""
        over = completion.why_over(now)
        if over:
            if not completion.is_waiting:
                stop = Cancel(completion.generate.request_id)
                self._send_if_connected(completion.backend, stop)
            self._drop(completion, over)
        elif completion.is_waiting:
            self._send_waiting(completion)

    def _drop(self, completion: Completion, error: str) -> None:
        del self._completions[completion.generate.request_id]
        completion.fail(error)

    def _send_waiting(self, completion: Completion) -> None:
        """To the worker it was meant for, or to another that decodes; perhaps later."""
        load = [id(other.backend) for other in self._completions.values() if not other.is_waiting]
        fitting = [
            backend
            for backend in self._backends.values()
            if backend.facts is not None
            and (backend is completion.backend or backend.facts.role == "decode")
        ]
        fitting.sort(key=lambda one: (one is not completion.backend, load.count(id(one))))
        for backend in fitting:
            if self._send_if_connected(backend, completion.generate):
                completion.backend, completion.is_waiting = backend, False
                return

    def _lose(self, backend: Backend, reason: str) -> None:
        """Its prompts begin again elsewhere if nobody was told a token of them, else they end."""
        if backend.facts is None:
            return
        lost = f"worker {backend.name}: {reason}"
        if not self._survives_loss:
            raise WorkerDied(lost)
        logger.warning("%s", lost)
        backend.facts, backend.hello_at_s, backend.hello_pause_s = None, 0.0, 0.0
        self.scrapes.lost(backend.key)
        for completion in list(self._completions.values()):
            if completion.backend is not backend or completion.is_waiting:
                continue
            backend.given_up.append(completion.generate.request_id)
            if completion.output or completion.attempt >= MAX_ATTEMPTS:
                told = f"after {len(completion.output)} tokens" if completion.output else "again"
                self._drop(completion, f"{lost}, {told}")
            else:
                del self._completions[completion.generate.request_id]
                completion.begin_again()
                self._completions[completion.generate.request_id] = completion

    def _greet(self, backend: Backend, now: float) -> None:
        """Again and again, with longer pauses of uneven length."""
        if now >= backend.hello_at_s and self._send_if_connected(
            backend, Hello(WIRE_VERSION, None)
        ):
            pause = min(HELLO_RETRY_MAX_S, 2 * backend.hello_pause_s or HELLO_RETRY_S)
            backend.hello_pause_s = pause
            backend.hello_at_s = now + pause * random.uniform(0.75, 1.25)

    def _welcomed(self, backend: Backend, welcome: Welcome) -> None:
        known = backend.facts
        if known is not None and known.incarnation != welcome.facts.incarnation:
            self._lose(backend, "a new process answers")
        backend.facts = welcome.facts
        backend.hello_pause_s = 0.0
        for request_id in backend.given_up:
            self._send_if_connected(backend, Cancel(request_id))
        backend.given_up.clear()

    def _send_if_connected(self, backend: Backend, message: Message) -> bool:
        try:
            self._channel.send(backend.key, message)
        except ControlError:
            return False  # its silence will be noticed
        return True

    def _receive(self, letter: Letter) -> None:
        message = letter.message
        backend = self._backends[letter.peer]
        backend.last_seen_s = time.monotonic()
        match message:
            case Token() | Finished():
                self._progress(backend, message)
            case Welcome():
                self._welcomed(backend, message)
            case HelloWanted():
                self._lose(backend, "it does not know this router any more")
            case Status():
                self._statuses[letter.peer] = message
            case Metrics(text=text):
                self.scrapes.told(letter.peer, text)
            case CacheState():
                self._cache_states[letter.peer] = message
            case Reject(field=name, ours=ours, theirs=theirs):
                raise HandshakeRejected(name, ours, theirs)
            case Goodbye(reason=reason):
                self._lose(backend, f"it left: {reason}")
            case Heartbeat() | RegionsUpdate() | RegionsAck() | RegionsAt():
                pass
            case _:
                self.num_misplaced += 1
                if self.num_misplaced & (self.num_misplaced - 1) == 0:  # 1st, 2nd, 4th, ...
                    name = type(message).__name__
                    logger.warning("dropped %s from %s: not for a router", name, letter.peer)

    def _progress(self, backend: Backend, message: Token | Finished) -> None:
        """Of a prompt that this worker has; what was given up or taken elsewhere is nobody's."""
        completion = self._completions.get(message.request_id)
        if completion is None or completion.backend is not backend or completion.is_waiting:
            return
        if isinstance(message, Token):
            completion.take(message.index, message.token)
        else:
            completion.close(message)
        if completion.finished is not None:
            del self._completions[message.request_id]

    def close(self) -> None:
        self._channel.close()
