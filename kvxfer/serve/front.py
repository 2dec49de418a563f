"""An asyncio loop's side of a router: one thread, no locks.

Facts (ZeroMQ 4.3.5, run): a socket's file descriptor is edge-triggered. It becomes readable when
its state changes, and any call on the socket, a send too, may take that edge away. So after every
wake-up and every send the router is polled until nothing is readable; the timer would find within
TICK_S what was missed. A socket that is closed takes its descriptor along, whose number may be a
client's connection the next moment: so they are gathered in an epoll of our own, which forgets what
is closed (Linux), and the loop waits for that one alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ControlError
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.observed import Observed
from kvxfer.serve.router import Router
from kvxfer.serve.served import ServedModel
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
        self._epoll: select.epoll | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn_is_due = False
        self.failure: BaseException | None = None
        """What the router raised: nothing is served any more, and its owner may want to end."""

    @property
    def num_in_flight(self) -> int:
        """Completions that somebody waits for."""
        return len(self._streams)

    def start(self) -> None:
        """Take the router into the running loop."""
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self._turn)
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
        decode: Backend | None = None,
        prefill: str = "",
    ) -> Stream:
        """Begin a completion; several may share one `wake`. Whoever began it releases it. A probe
        is in no metrics and no traces. `decode` and the id of a prefill worker are the pair that
        it is meant for, where it is not to be chosen.

        Raises ControlError when no worker can take it.
        """
        if self.failure is not None:
            raise ControlError(f"the router stopped: {self.failure}")
        if self.is_closing:
            raise ControlError("the server is shutting down")
        if not self.knows("decode"):
            raise ControlError("there is no decode worker")
        span = NO_SPAN if is_probe else self.spans.begin("router", traceparent, request_id)
        completion = self.router.submit(
            decode,
            tokens,
            max_new_tokens,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            verify=verify,
            request_id=request_id,
            traceparent=span.traceparent,
            prefill=prefill,
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
        return not self.is_closing and self.failure is None and bool(self.ready("decode"))

    def ready(self, role: str) -> list[Backend]:
        """The workers of a role that something new may be given to."""
        return [one for one in self.router.backends if one.role == role and one.takes_new]

    def limited(self, served: ServedModel) -> ServedModel:
        """`served` with what the decode workers that are there take, where that is less."""
        told = [one.facts.max_model_len for one in self.ready("decode") if one.facts is not None]
        longest = min(told, default=served.max_model_len)
        return served if longest >= served.max_model_len else replace(served, max_model_len=longest)

    def knows(self, role: str) -> bool:
        """Whether there was a worker of that role: a prompt waits until it is there again."""
        return any(one.role == role for one in self.router.backends)

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
        self._unwatch()
        self._loop = None

    def _load(self) -> tuple[int, int]:
        """Completions that workers have, and that none has."""
        waiting = sum(one.completion.is_waiting for one in self._streams)
        return len(self._streams) - waiting, waiting

    # --- in the loop --------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._loop is None or self.failure is not None:
            return
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._watch()
        self._turn()

    def _watch(self) -> None:
        """Workers may have been added or have left since the last time."""
        if self._epoll is not None:
            for fd in self.router.fds():
                with contextlib.suppress(FileExistsError):
                    self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self) -> None:
        if self._epoll is not None and self._loop is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._epoll = None

    def _turn_soon(self) -> None:
        """After a send: it may have taken an edge away."""
        if self._loop is not None and not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if self._loop is None or self.failure is not None:
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
        self.failure = error
        self._unwatch()
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
