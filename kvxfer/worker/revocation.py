"""A revocation under way: peers are told until they have let go, or are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.worker.growth import REPEAT_S
from kvxfer.worker.peers import PeerTable

ACK_TIMEOUT_S = 5.0


class Revocation:
    """The newest of a worker. Control thread only."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._told: RegionsRevoke | None = None
        self._deadline_s = 0.0
        self._repeat_at_s = 0.0
        self.handlers: dict[type, Callable[[str, Any], None]] = {RegionsRevoked: self._on_revoked}

    def begin(self, revoke: RegionsRevoke) -> None:
        now = time.monotonic()
        self._deadline_s, self._repeat_at_s = now + ACK_TIMEOUT_S, now + REPEAT_S
        self._told = revoke
        self._peers.holders.came_back.clear()
        self._peers.exchange.revoke(revoke)

    def has_ended(self) -> bool:
        """Whether all have let go; those who are too late are lost here."""
        if self._told is None:
            return False
        owing = self._peers.holders.owing
        if owing and time.monotonic() < self._deadline_s:
            if time.monotonic() >= self._repeat_at_s:  # it, or the answer, may have been lost
                self._repeat_at_s = time.monotonic() + REPEAT_S
                self._peers.exchange.repeat(self._told)
            return False
        self._told = None
        for key in list(owing):
            self._peers.lose(key, f"it did not let go of regions within {ACK_TIMEOUT_S:g} s")
        return True

    def _on_revoked(self, key: str, revoked: Any) -> None:
        peer, epoch = self._peers.get(key), self._peers.where().epoch
        if peer is not None and revoked.epoch == epoch:
            self._peers.holders.acknowledged(peer, epoch)
