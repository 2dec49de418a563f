"""The router: turns prompts into requests for (prefill, decode) pairs. Over ZMQ only, for now."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvxfer.control.cache_messages import CacheState, Defragment, Shrink, Sleep, WakeUp
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.facts import WorkerFacts
from kvxfer.control.messages import (
    WIRE_VERSION,
    Cancel,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Sampling,
    Status,
    StatusQuery,
    Token,
    TransferStats,
    Welcome,
)
from kvxfer.errors import ControlError, DeadlineExceeded, HandshakeRejected, WorkerDied

HELLO_RETRY_S = 1.0
HEARTBEAT_S = 0.5


@dataclass
class Backend:
    """A worker that the router talks to."""

    key: str
    facts: WorkerFacts | None = None
    last_seen_s: float = field(default_factory=time.monotonic)
    hello_sent_s: float = 0.0


@dataclass
class Completion:
    """One prompt on its way; filled in as messages arrive."""

    request_id: str
    tokens: list[int]
    backend: Backend
    sent_s: float
    output: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    finished: Finished | None = None

    def finish(self, finished: Finished) -> None:
        """Never a silent truncation: an end without all of its tokens is an error."""
        if not finished.error and len(self.output) != finished.num_tokens:
            lost = f"{len(self.output)} of {finished.num_tokens} tokens arrived"
            finished = msgspec.structs.replace(finished, reason="error", error=lost)
        self.finished = finished

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds; NaN before there is one."""
        return float("nan") if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def transfer(self) -> TransferStats:
        return self.finished.transfer if self.finished else TransferStats()


class Router:
    """Dials workers, sends prompts, collects tokens. One thread; `poll` makes it move."""

    def __init__(self, peer_timeout_s: float = 5.0) -> None:
        self._channel = Channel(f"router.{secrets.token_hex(8)}")
        self._peer_timeout_s = peer_timeout_s
        self._backends: dict[str, Backend] = {}
        self._completions: dict[str, Completion] = {}
        self._statuses: dict[str, Status] = {}
        self._cache_states: dict[str, CacheState] = {}
        self._next_beat_s = 0.0

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
    ) -> Completion:
        """Send a prompt to a decode worker (or to the single process that it is compared with)."""
        request_id, sent_s = request_id or secrets.token_hex(8), time.monotonic()
        self._channel.send(
            backend.key,
            Generate(
                request_id=request_id,
                tokens=tokens,
                max_new_tokens=max_new_tokens,
                sampling=sampling or Sampling(),
                stop_token_ids=list(stop_token_ids),
                prefill="",
                verify=verify,
            ),
        )
        completion = Completion(request_id, tokens, backend, sent_s)
        self._completions[request_id] = completion
        return completion

    def cancel(self, completion: Completion) -> None:
        """Idempotent; the end comes as a Finished with reason 'cancelled'."""
        if completion.finished is None:
            self._channel.send(completion.backend.key, Cancel(completion.request_id))

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
                name = backend.facts.worker_id
                raise WorkerDied(f"worker {name}: nothing heard for {self._peer_timeout_s:g} s")
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            for backend in self._backends.values():
                self._send_if_connected(backend, Heartbeat())

    def _greet(self, backend: Backend, now: float) -> None:
        hello = Hello(WIRE_VERSION, None)
        if now - backend.hello_sent_s > HELLO_RETRY_S and self._send_if_connected(backend, hello):
            backend.hello_sent_s = now

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
            case Token(request_id=request_id, index=index, token=token):
                completion = self._completions.get(request_id)
                if completion is not None:
                    if index != len(completion.output):
                        raise ControlError(f"request {request_id}: token {index} out of order")
                    completion.output.append(token)
                    completion.first_token_s = completion.first_token_s or time.monotonic()
            case Finished(request_id=request_id):
                completion = self._completions.pop(request_id, None)
                if completion is not None:
                    completion.finish(message)
            case Welcome(facts=facts):
                backend.facts = facts
            case Status():
                self._statuses[letter.peer] = message
            case CacheState():
                self._cache_states[letter.peer] = message
            case Reject(field=name, ours=ours, theirs=theirs):
                raise HandshakeRejected(name, ours, theirs)
            case Goodbye(reason=reason):
                raise WorkerDied(f"worker {letter.peer.removeprefix('out:')} left: {reason}")
            case Heartbeat() | RegionsUpdate() | RegionsAck():
                pass
            case _:
                raise ControlError(
                    f"{type(message).__name__} from {letter.peer} is not for a router"
                )

    def close(self) -> None:
        self._channel.close()
