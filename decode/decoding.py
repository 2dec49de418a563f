"""The running batch: step after step, each token told, each sequence ended once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from decode.schedule import DecodeBatch, DecodeRequest
from kvxfer.control.router_messages import Token
from kvxfer.errors import KvxferError, NotFinite
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.pace import Pace


class Decoding:
    """Control thread only. `end` is called with a request that left the batch, and why."""

    def __init__(self, parts: WorkerParts, end: Callable[[DecodeRequest, str, str], None]) -> None:
        self._parts = parts
        self._batch = DecodeBatch(parts.options.max_num_seqs)
        self._end = end
        self.pace = Pace()

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

    def _step(self) -> None:
        batch = self._batch.next_batch()
        if not batch:
            return
        self._batch.is_computing = True
        self.pace.begin()
        steps = [request.next_step() for request in batch]
        self._parts.steps.submit(
            partial(self._parts.engine.runner.decode_step, steps),
            partial(self._stepped, batch),
            partial(self._step_failed, batch),
        )

    def _stepped(self, batch: list[DecodeRequest], tokens: list[int]) -> None:
        self._batch.is_computing = False
        self.pace.end(len(batch))
        for request, token in zip(batch, tokens, strict=True):
            self._take(request, token)
        self._step()

    def _take(self, request: DecodeRequest, token: int) -> None:
        self.tell(request, token)
        if request.finish_reason():
            self._batch.leave(request)
            self._end(request, request.finish_reason(), "")

    def _step_failed(self, batch: list[DecodeRequest], error: KvxferError) -> None:
        """Ends those that it failed for: all, unless it says which."""
        self._batch.is_computing = False
        tokens = error.tokens if isinstance(error, NotFinite) else [None] * len(batch)
        problems = error.problems if isinstance(error, NotFinite) else {}
        for index, (request, token) in enumerate(zip(batch, tokens, strict=True)):
            if token is not None:
                self._take(request, token)
            else:
                self._batch.leave(request)
                self._end(request, "error", problems.get(index, str(error)))
        self._step()
