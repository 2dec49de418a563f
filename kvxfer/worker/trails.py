"""Which states a request went through, and since when: a *trail*, for whoever looks.

A class whose `state` is a `TimedState` leaves one; nothing else about it changes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvxfer.control.view_messages import MAX_REQUESTS, MAX_STATES
from kvxfer.telemetry.trace import now_ns

S = TypeVar("S", bound=enum.Enum)


@dataclass(slots=True)
class Trail:
    states: list[tuple[str, int]] = field(default_factory=list)
    """(name, nanoseconds of CLOCK_MONOTONIC), in order."""
    request_id: str = ""
    peer: str = ""
    """Name of the worker at the other end."""

    def enter(self, state: str) -> None:
        """From now on; to enter the state that stands changes nothing. Bounded: of very many
        states the last one is kept."""
        if self.states and self.states[-1][0] == state:
            return
        if len(self.states) == MAX_STATES:
            self.states.pop()
        self.states.append((state, now_ns()))


class TimedState(Generic[S]):
    """A dataclass field that notes when it is set; its default is `first`."""

    def __init__(self, first: S) -> None:
        self._first = first

    def __get__(self, owner: Any, kind: type) -> S:
        found: S = self._first if owner is None else owner.__dict__["_state"]
        return found

    def __set__(self, owner: Any, state: S) -> None:
        owner.__dict__["_state"] = state
        trail_of(owner).enter(state.name.lower())


def trail_of(owner: Any) -> Trail:
    trail: Trail = owner.__dict__.setdefault("_trail", Trail())
    return trail


class Trails:
    """Of the requests that came last. Control thread only."""

    def __init__(self) -> None:
        self._newest: deque[Trail] = deque(maxlen=MAX_REQUESTS)

    def add(self, request_id: str, peer: str, owner: Any) -> None:
        """`owner` has come, whose state is a TimedState; `peer` may become known later."""
        trail = trail_of(owner)
        trail.request_id, trail.peer = request_id, peer
        self._newest.append(trail)

    def __iter__(self) -> Iterator[Trail]:
        return iter(self._newest)
