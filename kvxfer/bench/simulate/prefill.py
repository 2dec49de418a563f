"""A prefill worker in the model: a queue, one prompt at a time in chunks, each handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

import simpy

from kvxfer.bench.simulate.cache import Cache
from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.request import Request, State
from kvxfer.bench.simulate.servers import Server
from kvxfer.worker.admission import GRANTS_AHEAD

Reserve = Callable[[Request], bool]
"""Give a request its blocks at decode: whether there were any."""


class PrefillWorker:
    """`reserve` blocks, `stream` a piece of so many tokens, and tell that all was `computed`: the
    cluster's."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        model: Server,
        control: Server,
        chunk_tokens: int,
    ) -> None:
        self._env = env
        self._costs = costs
        self._chunk_tokens = chunk_tokens
        self.model = model
        self.control = control
        self.cache: Cache
        self._queue: dict[int, deque[Request]] = {}
        """By decode worker, whose turn it is first."""
        self._wake = env.event()
        self.reserve: Reserve
        self.stream: Callable[[Request, int], None]
        self.computed: Callable[[Request], None]
        self.tokens_queued = 0
        """That wait, or are computed."""

    def start(self) -> None:
        self._env.process(self._run())

    def put(self, request: Request) -> None:
        """It waits for its turn; one that was preempted comes before the others of its worker."""
        request.state = State.QUEUED
        queue = self._queue.setdefault(request.decode, deque())
        queue.append(request)
        if request.num_preempted:
            order = sorted(queue, key=lambda one: (not one.num_preempted, one.arrival))
            self._queue[request.decode] = deque(order)
        self.tokens_queued += request.to_compute
        self.wake()

    def wake(self) -> None:
        """There may be blocks now, or something to do."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _next(self) -> Request | None:
        """The first that can have blocks at both ends, of the decode worker whose turn it is."""
        for decode, queue in self._queue.items():
            for request in islice(queue, GRANTS_AHEAD):
                if self._begin(request):
                    queue.remove(request)
                    del self._queue[decode]
                    if queue:
                        self._queue[decode] = queue  # its next turn comes after all the others'
                    return request
        return None

    def _begin(self, request: Request) -> bool:
        needed = self.cache.shape.blocks(request.to_compute)
        if self.cache.free >= needed and not self.reserve(request):
            return False
        if not self.cache.take(needed):  # it grows, if it can
            return False
        request.prefill_blocks = needed
        return True

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            request = self._next()
            if request is None:
                self._wake = self._env.event()
                yield self._wake
                continue
            request.state, total = State.COMPUTING, request.to_compute
            for start in range(0, total, self._chunk_tokens):
                size = min(self._chunk_tokens, total - start)
                yield self.model.serve(self._costs.chunk_s(size, start))
                self.tokens_queued -= size
                self.stream(request, size)
            request.state = State.MOVING
            self.computed(request)

    def release(self, request: Request) -> None:
        """Its KV is at decode."""
        self.cache.give(request.prefill_blocks)
        request.prefill_blocks = 0
        self.wake()
