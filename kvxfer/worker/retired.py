"""Memory that was given up while a lost peer may still reach it: tombstones, or pinned chunks."""

from __future__ import annotations

import logging

from kvxfer.cache.kv_cache import KVCache
from kvxfer.errors import KvxferError
from kvxfer.worker.holders import Holders
from kvxfer.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


class Retired:
    """Control thread only; `settle` lets it go as soon as nobody is left who could come."""

    def __init__(self, cache: KVCache, transfer: TransferThread, holders: Holders) -> None:
        self._cache = cache
        self._transfer = transfer
        self._holders = holders
        self._is_burying = False

    @property
    def tombstone_bytes(self) -> int:
        """Addresses without memory of ours, where what is written is thrown away."""
        return sum(tomb.size for tomb in self._cache.buffer.tombstones)

    @property
    def pinned_bytes(self) -> int:
        """Memory that stays mapped, since the driver has no tombstones."""
        return sum(chunk.size for chunk in self._cache.buffer.pinned)

    def settle(self) -> None:
        buffer = self._cache.buffer
        waiting = buffer.tombstones or buffer.pinned
        if waiting and not self._is_burying and not self._holders.names():
            self._is_burying = True
            self._transfer.bury(self._buried, self._failed)

    def _buried(self, _: object) -> None:
        self._is_burying = False

    def _failed(self, error: KvxferError) -> None:
        """Once is enough: what a driver will not release stays, and is accounted for."""
        logger.warning("memory that was retired is not released: %s", error)
