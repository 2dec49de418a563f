"""The sequences that decode together, and who of them takes part in the next step."""

from __future__ import annotations

from collections.abc import Sequence

from decode.schedule import DecodeRequest, RequestState


class DecodeBatch:
    """At most `max_num_seqs` run; the others that have joined wait for room among them. A step is
    computed at a time. Control thread only."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._running: list[DecodeRequest] = []
        self._filled: list[DecodeRequest] = []
        self._going: list[DecodeRequest] = []
        self.is_computing = False

    @property
    def members(self) -> list[DecodeRequest]:
        """Who has joined and not left, whether it runs or not."""
        return [*self._running, *self._filled]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def join(self, request: DecodeRequest) -> None:
        """A request whose first token is there joins at the next step that has room."""
        self._filled.append(request)

    def leave(self, request: DecodeRequest) -> None:
        """Idempotent."""
        for members in (self._running, self._filled):
            if request in members:
                members.remove(request)

    def next_batch(self) -> list[DecodeRequest]:
        """Who runs, who came first in front; empty while a step is being computed."""
        if self.is_computing:
            return []
        while self._filled and len(self._running) < self._max_num_seqs:
            request = self._filled.pop(0)
            request.state = RequestState.RUNNING
            self._running.append(request)
        return sorted(self._running, key=lambda request: request.arrival)

    def begin(self, going: Sequence[DecodeRequest]) -> None:
        """A step of these is computed from now on."""
        self._going, self.is_computing = list(going), True

    def end(self) -> None:
        self._going, self.is_computing = [], False

    def is_free(self, request: DecodeRequest) -> bool:
        """Whether it has joined, and no step that is being computed writes to its blocks."""
        return request in self.members and request not in self._going

    def preemptible(self) -> list[DecodeRequest]:
        """Of the members, who came first in front."""
        able = [request for request in self.members if request.can_resume]
        return sorted(able, key=lambda request: request.arrival)
