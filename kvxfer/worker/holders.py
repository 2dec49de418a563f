"""Who may still reach memory that this worker had registered and wants to give back.

A transport does not enforce deregistration, so memory is unmapped only when nobody is left here:
a peer goes when it has acknowledged a revocation, or when it died, which is known once a new
process of the same worker said Hello. Losing it, to silence or a deadline, proves nothing.
"""

from __future__ import annotations

from kvxfer.control.facts import WorkerFacts
from kvxfer.control.session import Peer


class Holders:
    """Control thread only."""

    def __init__(self) -> None:
        self.owing: set[str] = set()
        """Keys of those who were told of the newest revocation and have not acknowledged it."""
        self._lost: dict[str, str] = {}

    def told(self, peer: Peer) -> None:
        self.owing.add(peer.key)

    def acknowledged(self, peer: Peer) -> None:
        """Of the newest revocation, and so of all before it."""
        self.owing.discard(peer.key)
        self._lost.pop(peer.name, None)

    def lost(self, peer: Peer) -> None:
        self.owing.discard(peer.key)
        if peer.facts is not None and peer.knows_us:
            self._lost[peer.name] = peer.facts.incarnation

    def met(self, facts: WorkerFacts) -> None:
        """A process said who it is: an older one of the same worker is dead."""
        if self._lost.get(facts.worker_id, facts.incarnation) != facts.incarnation:
            del self._lost[facts.worker_id]

    def names(self) -> list[str]:
        """Worker ids of lost peers that may still come."""
        return sorted(self._lost)
