"""A reservation and the physical chunks that back parts of it.

The one owner of chunk handles. Chunks and committed ranges are immutable tuples: growth and
shrinking make new ones, so that a reader on another thread holds a consistent picture.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType

from kvxfer.errors import CacheError, CapacityExceeded, DriverError, MemoryPinned, OutOfMemory
from kvxfer.memory.chunks import LARGEST_CHUNK, Chunk, chunk_sizes, largest_for
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.ranges import Range, merged, without
from kvxfer.memory.steps import Steps, finished

Copy = Callable[[int, int, int], None]
"""Copies (to address, from address, size in bytes), and is done with it when it returns."""


class VirtualBuffer:
    """`size_bytes` of addresses, at `base_address` until `close()`, backed chunk by chunk.

    Not thread-safe: one thread calls it; any thread may read `chunks` and `committed`. After
    `close()` every call but `close()` raises CacheError, and so does `base_address`.
    """

    def __init__(
        self, driver: VmmDriver, size_bytes: int, largest_chunk_bytes: int = LARGEST_CHUNK
    ) -> None:
        """Reserve. `size_bytes` is a positive multiple of the driver's granularity."""
        if size_bytes <= 0 or size_bytes % driver.granularity:
            granularity = driver.granularity
            raise CacheError(f"size {size_bytes} is no positive multiple of {granularity}")
        self.size_bytes = size_bytes
        self._driver = driver
        self.largest_chunk_bytes = largest_chunk_bytes
        self._base: int | None = driver.reserve(size_bytes)
        self._tombstones: tuple[Range, ...] = ()
        self._pinned: tuple[Chunk, ...] = ()
        self._set_chunks(())

    @property
    def base_address(self) -> int:
        if self._base is None:
            raise CacheError("this buffer is closed")
        return self._base

    @property
    def driver(self) -> VmmDriver:
        """Of the chunks; another process's can be mapped beside them with it."""
        return self._driver

    @property
    def device(self) -> str:
        """torch's name of the device that the memory is on."""
        return self._driver.device

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Sorted by offset, disjoint."""
        return self._chunks

    @property
    def committed(self) -> tuple[Range, ...]:
        """What the chunks cover, neighbours merged: sorted, disjoint, with gaps between."""
        return self._committed

    @property
    def tombstones(self) -> tuple[Range, ...]:
        """Uncommitted bytes that do not fault: what is written there is thrown away."""
        return self._tombstones

    @property
    def pinned(self) -> tuple[Chunk, ...]:
        """Chunks that were retired where the driver has no tombstones: they stay mapped, and are
        nobody's to use, until `bury`."""
        return self._pinned

    def commit(self, ranges: Sequence[tuple[int, int]]) -> tuple[Chunk, ...]:
        """Back all of `ranges`, (offset, size) each and so far uncommitted, or none of them.

        Returns the new chunks, sorted. Raises CapacityExceeded beyond the reservation, MemoryPinned
        where `pinned` chunks are, CacheError for a misaligned, empty or overlapping range,
        DriverError or OutOfMemory; in every case nothing has changed. (Should the driver refuse
        the undoing as well, its error is raised and what could not be undone stays in `chunks`.)
        """
        return finished(self.committing(ranges))

    def committing(self, ranges: Sequence[tuple[int, int]]) -> Steps[tuple[Chunk, ...]]:
        """As `commit`, a chunk a step: `chunks` has all of them at the end. Until then nothing else
        is committed; what is there already may be used, and released."""
        base = self.base_address
        pieces = self._pieces(self._checked(ranges))
        made: list[Chunk] = []
        with ExitStack() as undo:
            for offset, size in pieces:
                chunk = Chunk(offset, size, self._driver.commit(base + offset, size))
                undo.callback(self._undo_commit, chunk)
                made.append(chunk)
                yield
            undo.pop_all()
        self._set_chunks((*self._chunks, *made))
        self._tombstones = without(self._tombstones, pieces)
        return tuple(made)

    def decommit(self, chunks: Iterable[Chunk]) -> None:
        """Release whole chunks of this buffer; their addresses stay reserved and fault again.

        The caller has made sure that nothing, local or remote, still uses them. Raises CacheError,
        with nothing changed, for a chunk that is not one of `self.chunks`. After a DriverError
        the chunks already released are gone from `self.chunks`, the others still there.
        """
        self._dispose(self._driver.decommit, chunks)

    def retire(self, chunks: Iterable[Chunk]) -> None:
        """`decommit` chunks that a lost peer may still reach: until `bury` their addresses do not
        fault. They become tombstones or, where the driver has none, stay in place, pinned."""
        before = self._chunks
        dispose = self._driver.retire if self._driver.can_retire else _leave
        gone: set[Chunk] = set()
        try:
            self._dispose(dispose, chunks)
        finally:
            gone.update(set(before).difference(self._chunks))
            if self._driver.can_retire:
                tombs = (Range(chunk.offset, chunk.size) for chunk in gone)
                self._tombstones = merged((*self._tombstones, *tombs))
            else:
                self._pinned = tuple(sorted((*self._pinned, *gone)))

    def bury(self) -> None:
        """Have what was retired fault again: nobody can reach it any more."""
        while self._tombstones:
            tomb = self._tombstones[0]
            self._driver.bury(self.base_address + tomb.offset, tomb.size)
            self._tombstones = self._tombstones[1:]
        while self._pinned:
            chunk = self._pinned[0]
            self._driver.decommit(self.base_address + chunk.offset, chunk.size, chunk.handle)
            self._pinned = self._pinned[1:]

    def merge(self, chunks: Sequence[Chunk], copy: Copy) -> Chunk:
        """Replace neighbours by one chunk with the same contents; returns it.

        Nothing, local or remote, uses them meanwhile. As much physical memory again is needed for
        the time of the copy. Raises CacheError for chunks that are no neighbours here, OutOfMemory
        or DriverError from the driver: memory and contents are then as they were, though handles
        may have changed. (Should the driver refuse the undoing too, its error is raised and what
        could not be mapped again is no longer listed.)
        """
        old = sorted(chunks)
        for chunk in old:
            self._check_owned(chunk)
        if not old or any(a.end != b.offset for a, b in itertools.pairwise(old)):
            raise CacheError("only neighbouring chunks can be merged")
        offset, size = old[0].offset, old[-1].end - old[0].offset
        free = self._driver.memory_info().free_bytes
        if size > free:
            raise OutOfMemory("merge", 0, size, free)
        address = self.base_address + offset
        with ExitStack() as done:
            twin = self._driver.reserve(size)
            done.callback(self._driver.free, twin, size)
            spares = [self._map_twice(done, chunk, twin - offset) for chunk in old]
            with ExitStack() as undo:
                for chunk, spare in zip(old, spares, strict=True):
                    self.decommit([chunk])
                    undo.callback(self._map_again, chunk, spare)
                handle = self._driver.commit(address, size)
                undo.pop_all()
            self._set_chunks((*self._chunks, Chunk(offset, size, handle)))
            copy(address, twin, size)
        return Chunk(offset, size, handle)

    def release_physical(self) -> None:
        """Release every chunk; addresses, and tensors over them, stay as they are."""
        self.decommit(self._chunks)

    def export(self, chunk: Chunk, writable: bool = True) -> int:
        """A new file descriptor of one of `self.chunks`, which the caller owns and closes;
        `writable` as for `VmmDriver.export`."""
        if self._base is None:
            raise CacheError("this buffer is closed")
        self._check_owned(chunk)
        return self._driver.export(chunk.handle, writable)

    def close(self) -> None:
        """Release chunks and addresses; tensors over them must not be touched any more."""
        if self._base is None:
            return
        self.release_physical()
        self.bury()
        self._driver.free(self._base, self.size_bytes)
        self._base = None

    def __enter__(self) -> VirtualBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, ranges: Sequence[tuple[int, int]]) -> list[Range]:
        """`ranges` sorted, if they can be committed."""
        asked = sorted(Range(int(offset), int(size)) for offset, size in ranges)
        for item in asked:
            if item.size <= 0 or (item.offset | item.size) % self._driver.granularity:
                granularity = self._driver.granularity
                raise CacheError(f"{item} is empty or not aligned to {granularity} bytes")
            if item.offset < 0 or item.end > self.size_bytes:
                raise CapacityExceeded(f"{item} exceeds the {self.size_bytes} reserved bytes")
        for item in asked:
            if any(c.offset < item.end and item.offset < c.end for c in self._pinned):
                raise MemoryPinned(f"{item}: a lost peer may still reach what was there before")
        occupied = sorted([*asked, *self._committed])
        for left, right in itertools.pairwise(occupied):
            if left.end > right.offset:
                raise CacheError(f"{left} and {right} overlap; only uncommitted bytes can be taken")
        return asked

    def _pieces(self, ranges: list[Range]) -> list[Range]:
        """One entry for each chunk to be made."""
        pieces: list[Range] = []
        step_bytes = sum(size for _, size in ranges)
        for offset, size in ranges:
            largest = largest_for(size, step_bytes, self.largest_chunk_bytes)
            for piece in chunk_sizes(size, self._driver.granularity, largest):
                pieces.append(Range(offset, piece))
                offset += piece
        return pieces

    def _dispose(self, dispose: Callable[[int, int, int], None], chunks: Iterable[Chunk]) -> None:
        base = self.base_address
        doomed = list(chunks)
        if len(set(doomed)) != len(doomed):
            raise CacheError("the same chunk is given twice")
        for chunk in doomed:
            self._check_owned(chunk)
        gone: set[Chunk] = set()
        try:
            for chunk in doomed:
                dispose(base + chunk.offset, chunk.size, chunk.handle)
                gone.add(chunk)
        finally:
            self._set_chunks(chunk for chunk in self._chunks if chunk not in gone)

    def _map_twice(self, undo: ExitStack, chunk: Chunk, base: int) -> int:
        """A descriptor of `chunk`, which is mapped relative to `base` too, until `undo`."""
        spare = self._driver.export(chunk.handle)
        undo.callback(os.close, spare)
        handle = self._driver.import_(spare, base + chunk.offset, chunk.size)
        undo.callback(self._driver.decommit, base + chunk.offset, chunk.size, handle)
        return spare

    def _map_again(self, chunk: Chunk, spare: int) -> None:
        handle = self._driver.import_(spare, self.base_address + chunk.offset, chunk.size)
        self._set_chunks((*self._chunks, Chunk(chunk.offset, chunk.size, handle)))

    def _undo_commit(self, chunk: Chunk) -> None:
        """Release a chunk that is not listed yet; if that fails, list it: it keeps its owner."""
        try:
            self._driver.decommit(self.base_address + chunk.offset, chunk.size, chunk.handle)
        except DriverError:
            self._set_chunks((*self._chunks, chunk))
            raise

    def _check_owned(self, chunk: Chunk) -> None:
        index = bisect.bisect_left(self._chunks, chunk)
        if self._chunks[index : index + 1] != (chunk,):
            raise CacheError(f"{chunk} is no chunk of this buffer")

    def _set_chunks(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = tuple(sorted(chunks))
        self._committed = merged(Range(chunk.offset, chunk.size) for chunk in self._chunks)


def _leave(address: int, size_bytes: int, handle: int) -> None:
    """What `retire` does to a chunk that stays as it is."""
