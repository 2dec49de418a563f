"""Blocks by their keys, in host memory and on a disk: bounded, evicting, surviving a restart.

    put ──→ host tier ──evicted──→ disk tier ──evicted──→ gone
    get ←── host tier ←──promoted── disk tier

A key stands for its block's content: what KV is of which tokens before it, model, geometry and
layout (`kvxfer.cache.prefix_cache.block_hashes` with all that mixed in). So a block that is there
already need not be written again, and one that was evicted, damaged, half written or not writable
is a miss, nothing worse: `get` gives what was `put`, or None. Digests see to that
(`offload_slots`).

Facts checked by tests/connectors/test_offload_*: a writer killed with SIGKILL at any moment leaves
no wrong block; a full disk, a size limit and a cut file are misses while the host tier goes on.
Never run on: what is named in offload_slots; more than some GiB.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from connectors.offload_slots import MAX_KEY_BYTES, SlotFile
from connectors.offload_tier import Entry, Tier
from kvxfer.errors import ConnectorError, UsageError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreCounts:
    """Since the store was opened. Blocks."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    demoted: int = 0
    """Written to the disk tier since the host tier needed the slot."""
    promoted: int = 0
    evicted: int = 0
    """Gone, for want of room below."""
    damaged: int = 0
    """Found to be other than what was written."""
    failed: int = 0
    """Writes and reads that the system refused."""


@dataclass(frozen=True, slots=True)
class Held:
    """A block that stays where it is until `BlockStore.drop`."""

    key: bytes
    tier: int
    """Index of the tier."""
    slot: int


class BlockStore:
    """Over a tier, or a host tier before a disk tier, whose files it owns then. Any thread.

    Bytes move outside the lock, between a caller's memory and slots that are taken or pinned.
    """

    def __init__(self, *files: SlotFile) -> None:
        """Raises UsageError where the tiers' blocks are of different sizes; the files are the
        caller's then."""
        if not files or len({file.slot_bytes for file in files}) > 1:
            sizes = [file.slot_bytes for file in files]
            raise UsageError("slot_bytes", sizes, "must be the same in all tiers, at least one")
        self.tiers = [Tier(file) for file in files]
        self.slot_bytes = files[0].slot_bytes
        self.counts = StoreCounts()
        self._lock = threading.Lock()
        self._next_number = max(tier.next_number for tier in self.tiers)
        self._writing: set[bytes] = set()
        self._is_closed = False

    def has(self, key: bytes) -> bool:
        """Whether `get` would look somewhere; it may still miss."""
        with self._lock:
            return any(tier.has(key) for tier in self.tiers)

    def put(self, key: bytes, block: memoryview | bytes) -> bool:
        """Keep a block, for as long as there is room: whether it is there now, or about to be.
        Raises UsageError for a key or a block that is too long or empty."""
        self._check(key, block)
        with self._lock:
            if self.tiers[0].use(key) is not None or key in self._writing:
                return True
        return self._write(0, key, memoryview(block)) is not None or self.has(key)

    def hold(self, key: bytes, block: memoryview | bytes) -> Held | None:
        """Keep a block, of a key that was never used before, until it is dropped; None: it could
        not be written, or all slots are held."""
        self._check(key, block)
        for index in range(len(self.tiers)):
            entry = self._write(index, key, memoryview(block), pins=1)
            if entry is not None:
                return Held(key, index, entry.slot)
        return None

    def drop(self, held: Held) -> None:
        """Give up a block that was held: it is nowhere then, nor after a restart. Idempotent."""
        tier = self.tiers[held.tier]
        with self._lock:
            entry = tier.use(held.key)
        if entry is None:
            return
        try:
            tier.file.clear(entry.slot)
        except ConnectorError as error:
            logger.warning("%s", error)  # a block that nobody asks for is evicted some day
        with self._lock:
            tier.remove(entry)
            tier.unpin(entry)

    def get(self, key: bytes) -> bytes | None:
        """The block, or None."""
        into = bytearray(self.slot_bytes)
        length = self.load(key, memoryview(into))
        return None if length is None else bytes(into[:length])

    def load(self, key: bytes, into: memoryview) -> int | None:
        """As `get`, to the start of `into`: how long the block is. Whatever was read meanwhile is
        there also where it is None."""
        for index, tier in enumerate(self.tiers):
            with self._pinned(tier, key) as entry:
                length = None if entry is None else self._read(tier, entry, into)
            if length is None:
                continue
            with self._lock:
                self.counts.hits += 1
            if index:
                self._promote(key, into[:length])
            return length
        with self._lock:
            self.counts.misses += 1
        return None

    def close(self) -> None:
        """What the host tier holds goes to the disk tier, as much as there is room for, the most
        recently used last. No other call is under way. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as release:
            for tier in self.tiers:
                release.callback(tier.file.close)
            if len(self.tiers) > 1:
                host, disk = self.tiers
                into = memoryview(bytearray(self.slot_bytes))
                for key in host.keys[-disk.file.num_slots :]:
                    with self._pinned(host, key) as entry:
                        length = None if entry is None else self._read(host, entry, into)
                    if length is not None:
                        self._demote(key, into[:length])

    def _check(self, key: bytes, block: memoryview | bytes) -> None:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise UsageError("key", key.hex(), f"must have 1 to {MAX_KEY_BYTES} bytes")
        size = memoryview(block).nbytes
        if not 0 < size <= self.slot_bytes:
            raise UsageError("block", size, f"must have 1 to {self.slot_bytes} bytes")

    @contextmanager
    def _pinned(self, tier: Tier, key: bytes) -> Iterator[Entry | None]:
        with self._lock:
            entry = tier.use(key)
            if entry is not None:
                entry.pins += 1
        try:
            yield entry
        finally:
            if entry is not None:
                with self._lock:
                    tier.unpin(entry)

    def _read(self, tier: Tier, entry: Entry, into: memoryview) -> int | None:
        """Of an entry that is pinned. What cannot be read, or is not what was written, is out."""
        try:
            length = tier.file.read(entry.slot, entry.key, into)
            reason = "is not what was written"
        except ConnectorError as error:
            length, reason = None, str(error)
        if length != entry.length:
            with self._lock:
                self.counts.damaged += 1
                tier.remove(entry)
            logger.warning("%s: slot %d %s: its block is lost", tier.file.name, entry.slot, reason)
            return None
        return length

    def _write(self, index: int, key: bytes, block: memoryview, pins: int = 0) -> Entry | None:
        """Into a tier, whose least recently used block makes room; None: it is not there."""
        tier = self.tiers[index]
        with self._lock:
            if key in self._writing or tier.has(key):
                return None
            room = tier.take()
            if room is None:
                return None
            number = self._next_number
            self._next_number += 1
            self._writing.add(key)
        try:
            if room.victim is not None:
                self._make_way(index, room.victim)
            tier.file.write(room.slot, key, number, block)
        except ConnectorError as error:
            with self._lock:
                self.counts.failed += 1
                tier.shun(room.slot)
            logger.warning("%s: a block is not kept", error)
            return None
        finally:
            with self._lock:
                self._writing.discard(key)
        with self._lock:
            self.counts.stored += index == 0 or bool(pins)
            entry = tier.add(key, room.slot, len(block))
            entry.pins = pins
        return entry

    def _make_way(self, index: int, victim: Entry) -> None:
        """Its slot is overwritten next: the tier below takes it, if there is one."""
        if index + 1 == len(self.tiers):
            with self._lock:
                self.counts.evicted += 1
            return
        into = memoryview(bytearray(self.slot_bytes))
        length = self._read(self.tiers[index], victim, into)
        if length is not None:
            self._demote(victim.key, into[:length])

    def _demote(self, key: bytes, block: memoryview) -> None:
        with self._lock:
            if self.tiers[1].use(key) is not None:
                return
        if self._write(1, key, block) is not None:
            with self._lock:
                self.counts.demoted += 1

    def _promote(self, key: bytes, block: memoryview) -> None:
        if self._write(0, key, block) is not None:
            with self._lock:
                self.counts.promoted += 1
