"""Who may still reach memory that this worker had registered and wants to give back, and by which
of its agents.

A transport does not enforce deregistration, so memory is unmapped only when nobody is left here:
a peer goes when it has acknowledged a revocation, or when it died, which is known once a new
process of the same worker said Hello. Losing it, to silence or a deadline, proves nothing. The same
holds of an agent: it ends once all who were told of it have renewed, or died.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvxfer.control.facts import WorkerFacts
from kvxfer.control.session import Peer

GRACE_S = 1.0


@dataclass(slots=True)
class _Lost:
    incarnation: str
    epochs: set[int]
    """It was told of the agents of these, and may use them."""


class Holders:
    """Control thread only."""

    def __init__(self) -> None:
        self.owing: set[str] = set()
        """Keys of those who were told of the newest revocation and have not acknowledged it."""
        self._lost: dict[str, _Lost] = {}
        """By worker id, or by key where it never said who it is."""
        self._astray: set[str] = set()
        """Worker ids of lost peers, whatever they let go of."""
        self.came_back: dict[str, float] = {}
        """Lost peers that are here again, as they were or started anew: what a transport kept of
        them (twice in 720 deaths a connection that was half made) goes with the next epoch. Worker
        ids, and when that is due: at once where we dialled, in a while where they did."""

    def told(self, peer: Peer) -> None:
        self.owing.add(peer.key)

    def acknowledged(self, peer: Peer, epoch: int) -> None:
        """Of revocation `epoch`, the newest, and so of all before it."""
        self.owing.discard(peer.key)
        self._lost.pop(peer.name, None)
        peer.told_epoch = epoch

    def lost(self, peer: Peer, epoch: int) -> None:
        """In `epoch`, which it may have heard of.

        One that never answered our greeting moved nothing by what that said: should it be stopped
        for hours, no agent is kept for each greeting that waits for it.
        """
        self.owing.discard(peer.key)
        if not peer.knows_us:
            return
        told = set(range(peer.told_epoch, epoch + 1)) if peer.is_met else set()
        incarnation = peer.facts.incarnation if peer.facts else ""
        self._astray.add(peer.name)
        before = self._lost.get(peer.name)
        if before is not None and before.incarnation == incarnation:
            told |= before.epochs
        self._lost[peer.name] = _Lost(incarnation, told)

    def left(self, peer: Peer) -> None:
        """It was lost by its own word, or ours, that nothing is under way, nor will be."""
        self._lost.pop(peer.name, None)

    def met(self, peer: Peer, facts: WorkerFacts) -> None:
        """A process said who it is: an older one of the same worker is dead, and it may be the one
        whom we greeted before in vain."""
        if facts.worker_id in self._astray:
            self._astray.remove(facts.worker_id)
            grace_s = 0.0 if peer.key.startswith("out:") else GRACE_S
            self.came_back[facts.worker_id] = time.monotonic() + grace_s
        unnamed = self._lost.pop(peer.key, None)
        if unnamed is not None:
            unnamed.incarnation = facts.incarnation
        before = self._lost.get(facts.worker_id, unnamed)
        if before is None:
            return
        if before.incarnation != facts.incarnation:
            del self._lost[facts.worker_id]
        else:
            self._lost[facts.worker_id] = before

    def renewed(self, peer: Peer) -> None:
        """It met the agent that it was told of last, which a connector does when nothing is under
        way with earlier ones (`AgentConnector.connect`)."""
        lost = self._lost.get(peer.name)
        if lost is not None:
            lost.epochs = {epoch for epoch in lost.epochs if epoch >= peer.told_epoch}

    def is_renewal_due(self) -> bool:
        now = time.monotonic()
        return any(due_s <= now for due_s in self.came_back.values())

    def names(self) -> list[str]:
        """Lost peers that may still come."""
        return sorted(self._lost)

    def epochs(self) -> set[int]:
        """Whose agents they may use."""
        return set().union(*(lost.epochs for lost in self._lost.values()))
