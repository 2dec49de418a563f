"""Requests that were given up while somebody may still write to their blocks.

A block belongs to its writer until that has said that it ended, or is fenced: there is no deadline
after which it would be safe to use it. Abort is repeated until it is answered by the worker that
was granted the blocks; another one at its address is not asked, and not believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from decode.schedule import DecodeRequest, RequestState
from kvxfer.control.messages import Abort
from kvxfer.control.session import Peer
from kvxfer.transfer.connector import Direction
from kvxfer.worker.assembly import WorkerParts


class Quarantine:
    """Control thread only. `freed` is called when blocks came back."""

    def __init__(self, parts: WorkerParts, freed: Callable[[], None]) -> None:
        self._parts = parts
        self._freed = freed
        self._waiting: dict[str, DecodeRequest] = {}
        """By grant: a request may be here several times, once for each attempt."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._waiting.values()))

    def get(self, grant_id: str) -> DecodeRequest | None:
        return self._waiting.get(grant_id)

    def add(self, request: DecodeRequest, reason: str) -> None:
        """Give up a request that is at prefill. One without blocks is over at once."""
        if not request.blocks:
            request.state = RequestState.ENDED
            if not request.writer_ended:
                self._abort(request, reason)
            self._freed()
            return
        request.state = RequestState.ABORTING
        self._parts.engine.pools.free(request.shared_blocks)  # nobody was ever to write there
        self._parts.engine.pools.quarantine(request.own_blocks)
        self._waiting[request.grant_id] = request
        if request.direction is Direction.PUSH and not request.writer_ended:
            self._abort(request, reason)
        self.end_if_quiet(request)  # a pull says Abort once its own reads have ended

    def writer_over(self, request: DecodeRequest) -> None:
        request.writer_ended = True
        self.end_if_quiet(request)

    def end_if_quiet(self, request: DecodeRequest) -> None:
        """Its blocks are free once nobody can write to them any more."""
        if request.state is not RequestState.ABORTING or request.reads_in_flight:
            return
        pulls = request.direction is Direction.PULL
        if not request.writer_ended and pulls:
            self._abort(request, "given up")
        if request.writer_ended or pulls:
            request.state = RequestState.ENDED
            del self._waiting[request.grant_id]
            self._parts.engine.pools.release_quarantined(request.own_blocks)
            self._freed()

    def _abort(self, request: DecodeRequest, reason: str) -> None:
        assert request.prefill is not None
        request.asked(time.monotonic())
        abort = Abort(request.request_id, request.grant_id, reason)
        self._parts.peers.send(request.prefill.key, abort)

    def peer_ready(self, peer: Peer) -> None:
        """Ask again for the end of what was given up while there was no connection."""
        for request in self:
            if request.is_at(peer) and not request.writer_ended:
                self._abort(request, "given up")

    def fenced(self, worker_id: str) -> None:
        """The process of this worker that wrote is over."""
        for request in self:
            if request.prefill is not None and request.prefill_name == worker_id:
                self.writer_over(request)

    def tick(self, now_s: float) -> None:
        ready = self._parts.peers.ready()
        for request in self:
            waits = not request.writer_ended and not request.reads_in_flight
            is_there = any(request.is_at(peer) for peer in ready)
            if waits and request.ask_at_s <= now_s and is_there:
                self._abort(request, "given up")
