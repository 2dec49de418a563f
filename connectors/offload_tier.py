"""What is in which slot of one tier, and which block goes first. No bytes are moved here.

Not for several threads: `BlockStore` has the lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from connectors.offload_slots import SlotFile

SHUN_S = 60.0


@dataclass(eq=False, slots=True)
class Entry:
    """A block that is in a tier. Pinned, it is neither evicted nor overwritten."""

    key: bytes
    slot: int
    length: int
    pins: int = 0
    is_doomed: bool = False
    """Its slot is free once nobody pins it: it was removed meanwhile."""


@dataclass(frozen=True, slots=True)
class Room:
    """A slot to write to, out of anybody's reach; `victim` is what was in it until now."""

    slot: int
    victim: Entry | None = None


class Tier:
    """Slots of `file`: each free, taken to be written to, an entry's, or shunned."""

    def __init__(self, file: SlotFile) -> None:
        """Takes up what is in the file already; of two blocks of one key the later one. The least
        recently written is the least recently used. Raises ConnectorError."""
        self.file = file
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        free = set(range(file.num_slots))
        found = sorted(file.headers(), key=lambda pair: pair[1].number)
        self.next_number = found[-1][1].number + 1 if found else 1
        for slot, header in found:
            earlier = self._entries.pop(header.key, None)
            if earlier is not None:
                free.add(earlier.slot)
            free.remove(slot)
            self.add(header.key, slot, header.length)
        self._free = sorted(free)
        """A heap: the first slots, whose pages are there, are used over and over."""
        self._shunned: deque[tuple[float, int]] = deque()
        """Not to be tried again before a time."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> list[bytes]:
        """Least recently used first."""
        return list(self._entries)

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def use(self, key: bytes) -> Entry | None:
        """The entry, which is the most recently used one now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def take(self) -> Room | None:
        """A free slot, or the least recently used one that nobody pins; None: all are pinned."""
        while self._shunned and self._shunned[0][0] < time.monotonic():
            heappush(self._free, self._shunned.popleft()[1])
        if self._free:
            return Room(heappop(self._free))
        for entry in self._entries.values():
            if not entry.pins:
                del self._entries[entry.key]
                return Room(entry.slot, entry)
        return None

    def add(self, key: bytes, slot: int, length: int) -> Entry:
        """`slot`, which was taken, holds `key` now."""
        entry = self._entries[key] = Entry(key, slot, length)
        return entry

    def shun(self, slot: int) -> None:
        """`slot`, which was taken, could not be written to: a full disk may have room in others."""
        self._shunned.append((time.monotonic() + SHUN_S, slot))

    def remove(self, entry: Entry) -> None:
        """Forget a block, if it is still there; who has pinned it may go on."""
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        entry.is_doomed = True
        if not entry.pins:
            heappush(self._free, entry.slot)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.is_doomed and not entry.pins:
            heappush(self._free, entry.slot)
