"""What was given up while somebody may still use it: memory, and the agents of earlier epochs."""

from __future__ import annotations

import logging

from kvxfer.cache.kv_cache import KVCache
from kvxfer.errors import KvxferError
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


class Retired:
    """Control thread only; `settle` lets it go as soon as nobody is left who could come."""

    def __init__(self, cache: KVCache, transfer: TransferThread, peers: PeerTable) -> None:
        self._cache = cache
        self._transfer = transfer
        self._peers = peers
        self._is_burying = False
        self._epochs: set[int] = set()

    @property
    def tombstone_bytes(self) -> int:
        """Addresses without memory of ours, where what is written is thrown away."""
        return sum(tomb.size for tomb in self._cache.buffer.tombstones)

    @property
    def pinned_bytes(self) -> int:
        """Memory that stays mapped, since the driver has no tombstones."""
        return sum(chunk.size for chunk in self._cache.buffer.pinned)

    @property
    def num_epochs(self) -> int:
        """Earlier ones whose agents are kept."""
        return len(self._epochs)

    def add_epoch(self, epoch: int) -> None:
        """Another one has begun."""
        self._epochs.add(epoch)

    def settle(self) -> None:
        buffer = self._cache.buffer
        waiting = buffer.tombstones or buffer.pinned
        if waiting and not self._is_burying and not self._peers.holders.names():
            self._is_burying = True
            self._transfer.bury(self._buried, self._failed)
        if self._epochs:
            kept = self._epochs & self._peers.epochs_in_use()
            if kept != self._epochs:
                self._epochs = kept
                self._transfer.retire(frozenset(kept), self._failed)

    def _buried(self, _: object) -> None:
        self._is_burying = False

    def _failed(self, error: KvxferError) -> None:
        """Once is enough: what a driver will not release stays, and is accounted for."""
        logger.warning("what was retired is not released: %s", error)
