"""Which peers' transfers stand still.

A transport never notices a stopped process, and one whose control plane still speaks may have lost
its data plane: where transfers are under way and none has ended for long, the peer is fenced off.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Control thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, set[object]] = {}
        self._moved_s: dict[str, float] = {}
        """When a peer's transfers last went on: the first began, or one ended."""

    def began(self, peer: str) -> object:
        """What `ended` is to be told."""
        flight = object()
        if not self._under_way.get(peer):
            self._moved_s[peer] = self._clock()
        self._under_way.setdefault(peer, set()).add(flight)
        return flight

    def ended(self, peer: str, flight: object) -> None:
        """Also of what was forgotten meanwhile."""
        flights = self._under_way.get(peer, set())
        if flight in flights:
            flights.remove(flight)
            self._moved_s[peer] = self._clock()
        if not flights:
            self.forget(peer)

    def forget(self, peer: str) -> None:
        """It is lost: what is still under way says nothing of a later session."""
        self._under_way.pop(peer, None)
        self._moved_s.pop(peer, None)

    def stalled(self, timeout_s: float) -> list[str]:
        since = self._clock() - timeout_s
        return [peer for peer, moved_s in self._moved_s.items() if moved_s < since]
