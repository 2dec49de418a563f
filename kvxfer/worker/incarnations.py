"""Which process of each worker is the newest, and which ones are over.

An older one is believed nothing any more: its word may have been under way for long, and taken for
the new one's it would fence that.
"""

from __future__ import annotations

from collections import OrderedDict

from kvxfer.control.facts import WorkerFacts
from kvxfer.errors import HandshakeRejected

MAX_REMEMBERED = 4096
"""Workers, and processes that are over: bounded, the longest unheard of are forgotten first."""


class Incarnations:
    """Control thread only."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_over(self, facts: WorkerFacts) -> bool:
        return (facts.worker_id, facts.incarnation) in self._over

    def check(self, facts: WorkerFacts) -> None:
        """Raises HandshakeRejected for a process that a newer one has replaced."""
        if self.is_over(facts):
            newest = self._newest.get(facts.worker_id, "")
            raise HandshakeRejected("incarnation", newest, facts.incarnation)

    def met(self, facts: WorkerFacts) -> bool:
        """Whether it replaces another process of the same worker, which is over then."""
        worker_id, incarnation = facts.worker_id, facts.incarnation
        before = self._newest.pop(worker_id, incarnation)
        self._newest[worker_id] = incarnation
        if before != incarnation:
            self._over[worker_id, before] = None
        for remembered in (self._newest, self._over):
            if len(remembered) > MAX_REMEMBERED:
                remembered.popitem(last=False)
        return before != incarnation
