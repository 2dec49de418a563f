"""The running batch: step after step, each token told, each sequence ended once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from decode.batch import DecodeBatch
from decode.schedule import DecodeRequest, RequestState
from decode.supply import BlockSupply
from kvxfer.control.router_messages import Token
from kvxfer.errors import KvxferError, NotFinite
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.pace import Pace


class Decoding:
    """Control thread only. `end` is called with a request that ends, and why: it `leave`s."""

    def __init__(self, parts: WorkerParts, end: Callable[[DecodeRequest, str, str], None]) -> None:
        self._parts = parts
        self._batch = DecodeBatch(parts.options.max_num_seqs)
        self._supply = BlockSupply(parts)
        self._end = end
        self.pace = Pace()
        self._is_any_short = False
        self.on_preempted: Callable[[DecodeRequest], None] = lambda request: None
        """A request has left the batch for lack of blocks, and has to give back its own."""

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    def is_free(self, request: DecodeRequest) -> bool:
        """As `DecodeBatch.is_free`: it may end at once."""
        return self._batch.is_free(request)

    def leave(self, request: DecodeRequest) -> None:
        """Idempotent."""
        self._batch.leave(request)

    def tell(self, request: DecodeRequest, token: int) -> None:
        """Add the next token to a request's output, and send it to its router."""
        request.output.append(token)
        index = len(request.output) - 1
        self._parts.peers.send(request.router, Token(request.request_id, index, token))

    def join(self, request: DecodeRequest) -> None:
        """From the next step on, if it wants more tokens."""
        if request.finish_reason():
            self._end(request, request.finish_reason(), "")
            return
        self._batch.join(request)
        self._step()

    def tick(self) -> None:
        """Those who sat out go on as soon as there are blocks."""
        if self._is_any_short:
            self._step()

    def _step(self) -> None:
        """Begin the next one, unless one is being computed: of all who have the blocks for it."""
        if self._batch.is_computing:
            return
        batch = self._with_blocks()
        if not batch:
            return
        self._batch.begin(batch)
        self.pace.begin()
        steps = [request.next_step() for request in batch]
        self._parts.steps.submit(
            partial(self._parts.engine.runner.decode_step, steps),
            partial(self._stepped, batch),
            partial(self._step_failed, batch),
        )

    def _with_blocks(self) -> list[DecodeRequest]:
        """Who runs and can take part, who came first in front. The others were preempted, or sit
        this step out, until a deadline that counts from when nobody takes part."""
        going: list[DecodeRequest] = []
        short: list[DecodeRequest] = []
        for request in self._batch.next_batch():
            if request.state is RequestState.RUNNING:
                (going if self._has_blocks(request) else short).append(request)
        short = [request for request in short if request.state is RequestState.RUNNING]
        for request in going:
            request.is_short = False
        for request in short:
            if going or not request.is_short:
                request.deadline_s = time.monotonic() + self._parts.options.request_timeout_s
            request.is_short = True
        self._is_any_short = bool(short)
        return going

    def _has_blocks(self, request: DecodeRequest) -> bool:
        """Give it what it writes to next: else as the cache grows, else of those who came last. The
        only one that could be preempted keeps what it has: others end without its blocks."""
        while not self._supply.extend(request):
            able = self._batch.preemptible()
            if self._supply.grows_for(request) or able == [request]:
                return False
            victim = able[-1]
            self._batch.leave(victim)
            self.on_preempted(victim)
            if victim is request:
                return False
        return True

    def _stepped(self, batch: list[DecodeRequest], tokens: list[int]) -> None:
        self.pace.end(len(batch))
        for request, token in zip(batch, tokens, strict=True):
            self._take(request, token)
        self._batch.end()
        self._step()

    def _take(self, request: DecodeRequest, token: int) -> None:
        self.tell(request, token)
        if request.finish_reason():
            self._end(request, request.finish_reason(), "")

    def _step_failed(self, batch: list[DecodeRequest], error: KvxferError) -> None:
        """Ends those that it failed for: all, unless it says which."""
        tokens = error.tokens if isinstance(error, NotFinite) else [None] * len(batch)
        problems = error.problems if isinstance(error, NotFinite) else {}
        for index, (request, token) in enumerate(zip(batch, tokens, strict=True)):
            if token is not None:
                self._take(request, token)
            else:
                self._end(request, "error", problems.get(index, str(error)))
        self._batch.end()
        self._step()
