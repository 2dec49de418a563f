"""An asyncio loop's side of a router: one thread, no locks.

Facts (ZeroMQ 4.3.5, run): a socket's file descriptor is edge-triggered. It becomes readable when
its state changes, and any call on the socket, a send too, may take that edge away. So after every
wake-up and every send the router is polled until nothing is readable; the timer would find within
TICK_S what was missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ControlError
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.observed import Observed
from kvxfer.serve.router import Router
from kvxfer.telemetry.request_metrics import RequestMetrics
from kvxfer.telemetry.spans import NO_SPAN, NO_SPANS, Spans

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""How often the router moves by itself: heartbeats, greetings, deadlines."""
MAX_POLLS = 64
"""Of one wake-up, before the loop's other work has its turn."""


@dataclass(eq=False)
class Stream:
    """A completion that somebody waits for. `wake` is set when tokens came, or its end did."""

    completion: Completion
    wake: asyncio.Event
    observed: Observed | None
    """None: nobody's request."""
    num_seen: int = 0
    """Tokens that `wake` was set for."""

    def has_news(self) -> bool:
        return self.completion.finished is not None or len(self.completion.output) > self.num_seen


class Front:
    """Makes a router move within the running loop, and wakes those who wait. One thread.

    `start` and `close` are called in the loop; `close` leaves the router to its owner.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.is_closing = False
        self.spans: Spans = NO_SPANS
        """Those of requests; the owner's, set before the first."""
        self.metrics = RequestMetrics()
        self.metrics.load = self._load
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: set[Stream] = set()
        self._fds: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._turn_is_due = False
        self._failure: BaseException | None = None

    @property
    def num_in_flight(self) -> int:
        """Completions that somebody waits for."""
        return len(self._streams)

    def start(self) -> None:
        """Take the router into the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tick()

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        wake: asyncio.Event,
        *,
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        verify: bool = False,
        request_id: str = "",
        traceparent: str = "",
        is_probe: bool = False,
    ) -> Stream:
        """Begin a completion; several may share one `wake`. Whoever began it releases it. A probe
        is in no metrics and no traces.

        Raises ControlError when no worker can take it.
        """
        if self._failure is not None:
            raise ControlError(f"the router stopped: {self._failure}")
        if self.is_closing:
            raise ControlError("the server is shutting down")
        backend = self._any_decode()
        span = NO_SPAN if is_probe else self.spans.begin("router", traceparent, request_id)
        completion = self.router.submit(
            backend,
            tokens,
            max_new_tokens,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            verify=verify,
            request_id=request_id,
            traceparent=span.traceparent,
        )
        observed = None if is_probe else Observed(completion, self.metrics, span)
        stream = Stream(completion, wake, observed)
        self._streams.add(stream)
        self._turn_soon()
        return stream

    def sent(self) -> None:
        """Something else made the router send: take in what comes soon."""
        self._turn_soon()

    def release(self, stream: Stream) -> None:
        """Nobody waits any longer: what has not ended is cancelled, at once. Idempotent."""
        if stream not in self._streams:
            return
        self._streams.discard(stream)
        if stream.observed is not None:
            stream.observed.left()
        if stream.completion.finished is None:
            self.router.cancel(stream.completion)
            self._turn_soon()

    @property
    def can_serve(self) -> bool:
        """Whether a decode worker is there, and nothing ended."""
        return not self.is_closing and self._failure is None and bool(self.ready("decode"))

    def ready(self, role: str) -> list[Backend]:
        """The workers of a role that have said who they are."""
        backends = self.router.backends
        return [one for one in backends if one.facts is not None and one.facts.role == role]

    def end(self, reason: str = "the server is shutting down") -> None:
        """Take nothing more, and end what is under way as an error. Idempotent."""
        self.is_closing = True
        for stream in self._streams:
            if stream.completion.finished is None:
                self.router.cancel(stream.completion)
                stream.completion.fail(reason)
            stream.wake.set()

    def close(self) -> None:
        """Leave the loop. Idempotent."""
        self.end()
        if self._timer is not None:
            self._timer.cancel()
        self._watch(set())
        self._loop = None

    def _load(self) -> tuple[int, int]:
        """Completions that workers have, and that none has."""
        waiting = sum(one.completion.is_waiting for one in self._streams)
        return len(self._streams) - waiting, waiting

    # --- in the loop --------------------------------------------------------------------------

    def _any_decode(self) -> Backend:
        for backend in self.ready("decode"):
            return backend
        raise ControlError("no decode worker is ready")

    def _tick(self) -> None:
        if self._loop is None or self._failure is not None:
            return
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._watch(set(self.router.fds()))
        self._turn()

    def _watch(self, fds: set[int]) -> None:
        """Workers may have been added or left since the last time."""
        assert self._loop is not None or not self._fds
        if self._loop is None:
            return
        for fd in self._fds - fds:
            self._loop.remove_reader(fd)
        for fd in fds - self._fds:
            self._loop.add_reader(fd, self._turn)
        self._fds = fds

    def _turn_soon(self) -> None:
        """After a send: it may have taken an edge away."""
        if self._loop is not None and not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if self._loop is None or self._failure is not None:
            return
        try:
            for _ in range(MAX_POLLS):
                self.router.poll(0)
                if not self.router.is_readable():
                    break
            else:
                self._turn_soon()
        except BaseException as error:
            self._fail(error)
            raise
        self._wake()

    def _fail(self, error: BaseException) -> None:
        """A router that raised is of no use any more; nobody waits for it for ever."""
        logger.error("the router stopped: %s: %s", type(error).__name__, error)
        self._failure = error
        self._watch(set())
        for stream in self._streams:
            stream.completion.fail(f"the router stopped: {error}")
            stream.wake.set()

    def _wake(self) -> None:
        for stream in self._streams:
            if stream.has_news():
                stream.num_seen = len(stream.completion.output)
                if stream.observed is not None:
                    stream.observed.news()
                stream.wake.set()
