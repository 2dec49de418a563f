"""The threads that carry parcels between a window and slots.

Bytes pass through a buffer of the thread's: what is read of a slot gets to the window only after
its digest was found right.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from secrets import token_bytes
from typing import Final

from connectors.offload_parcels import Extents
from connectors.offload_slots import read_slot
from connectors.offload_store import BlockStore, Held
from kvxfer.errors import ConnectorError

NUM_THREADS: Final = 2
"""Of a connector: while one waits for the disk, another copies."""


class Mover:
    """Between `store` and the window at `base_address`, which stays mapped until `close`.

    Methods return at once; futures raise ConnectorError. What is given is done in turn, and how
    much is under way is bounded by who gives it.
    """

    def __init__(self, store: BlockStore, base_address: int) -> None:
        self._store = store
        self._base = base_address
        self._life = token_bytes(16)
        self._numbers = count()
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "kvxfer-offload")

    def hold(self, extents: Extents) -> Future[Held]:
        """Put bytes of the window in a slot, until it is dropped."""
        key = self._life + next(self._numbers).to_bytes(8, "little")
        return self._pool.submit(self._hold, key, extents)

    def fetch(
        self, tier: int, slot_bytes: int, slot: int, key: bytes, extents: Extents
    ) -> Future[None]:
        """Bring what is in a slot of a peer's `tier`, a descriptor, to the window."""
        return self._pool.submit(self._fetch, tier, slot_bytes, slot, key, extents)

    def put(self, key: bytes, extents: Extents) -> Future[bool]:
        """Keep bytes of the window as the block `key`: whether it is there then."""
        return self._pool.submit(self._put, key, extents)

    def get(self, key: bytes, extents: Extents) -> Future[bool]:
        """Bring the block `key` to the window: whether it was there. If not, nothing changed."""
        return self._pool.submit(self._get, key, extents)

    def close(self) -> None:
        """Waits for what is being carried; drops the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _hold(self, key: bytes, extents: Extents) -> Held:
        held = self._store.hold(key, self._gathered(extents))
        if held is None:
            raise ConnectorError("offload: no slot for a parcel (see the log)")
        return held

    def _put(self, key: bytes, extents: Extents) -> bool:
        return self._store.put(key, self._gathered(extents))

    def _get(self, key: bytes, extents: Extents) -> bool:
        buffer = self._buffer(self._store.slot_bytes)
        if self._store.load(key, buffer) != extents.total_bytes:
            return False
        extents.scatter(buffer, self._base)
        return True

    def _fetch(self, tier: int, slot_bytes: int, slot: int, key: bytes, extents: Extents) -> None:
        size = extents.total_bytes
        buffer = self._buffer(max(size, self._store.slot_bytes))[:size]
        if read_slot(tier, slot_bytes, slot, key, buffer) != size:
            raise ConnectorError(
                f"offload: slot {slot} does not hold the parcel that was announced"
            )
        extents.scatter(buffer, self._base)

    def _gathered(self, extents: Extents) -> memoryview:
        block = self._buffer(self._store.slot_bytes)[: extents.total_bytes]
        extents.gather(self._base, block)
        return block

    def _buffer(self, size_bytes: int) -> memoryview:
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < size_bytes:
            found = self._own.buffer = memoryview(bytearray(size_bytes))
        return found
