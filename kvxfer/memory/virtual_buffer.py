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
from dataclasses import dataclass
from types import TracebackType

from kvxfer.errors import CacheError, CapacityExceeded, DriverError, OutOfMemory
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.ranges import Range, merged, without

LARGEST_CHUNK = 64 * 1024 * 1024
"""On a GPU 64 MiB chunks commit about as fast per byte as any, 2 MiB chunks 30 to 50 times slower
(measured on an H200, driver 580: 970-1,050 GiB/s against 21-38)."""

Copy = Callable[[int, int, int], None]
"""Copies (to address, from address, size in bytes), and is done with it when it returns."""


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """One physical allocation behind bytes [offset, offset + size) of a buffer."""

    offset: int
    size: int
    handle: int
    """The driver's; owned by the buffer."""

    @property
    def end(self) -> int:
        return self.offset + self.size


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
        self._set_chunks(())

    @property
    def base_address(self) -> int:
        if self._base is None:
            raise CacheError("this buffer is closed")
        return self._base

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
    def can_retire(self) -> bool:
        return self._driver.can_retire

    def commit(self, ranges: Sequence[tuple[int, int]]) -> tuple[Chunk, ...]:
        """Back all of `ranges`, (offset, size) each and so far uncommitted, or none of them.

        Returns the new chunks, sorted. Raises CapacityExceeded beyond the reservation, CacheError
        for a misaligned, empty or overlapping range, DriverError or OutOfMemory from the driver;
        in every case nothing has changed. (Should the driver refuse the undoing as well, its error
        is raised and what could not be undone stays listed in `chunks`.)
        """
        base = self.base_address
        pieces = self._pieces(self._checked(ranges))
        made: list[Chunk] = []
        with ExitStack() as undo:
            for offset, size in pieces:
                chunk = Chunk(offset, size, self._driver.commit(base + offset, size))
                undo.callback(self._undo_commit, chunk)
                made.append(chunk)
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
        """`decommit` chunks that a lost peer may still reach: they become tombstones.

        Only where `can_retire`.
        """
        before = self._chunks
        try:
            self._dispose(self._driver.retire, chunks)
        finally:
            gone = set(before).difference(self._chunks)
            tombs = (Range(chunk.offset, chunk.size) for chunk in gone)
            self._tombstones = merged((*self._tombstones, *tombs))

    def bury(self) -> None:
        """Have the tombstones fault again: nobody can reach them any more."""
        while self._tombstones:
            tomb = self._tombstones[0]
            self._driver.bury(self.base_address + tomb.offset, tomb.size)
            self._tombstones = self._tombstones[1:]

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

    def export(self, chunk: Chunk) -> int:
        """A new file descriptor of one of `self.chunks`, which the caller owns and closes."""
        if self._base is None:
            raise CacheError("this buffer is closed")
        self._check_owned(chunk)
        return self._driver.export(chunk.handle)

    def close(self) -> None:
        """Release chunks and addresses; tensors over them must not be touched any more."""
        if self._base is None:
            return
        self.release_physical()
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
        occupied = sorted([*asked, *self._committed])
        for left, right in itertools.pairwise(occupied):
            if left.end > right.offset:
                raise CacheError(f"{left} and {right} overlap; only uncommitted bytes can be taken")
        return asked

    def _pieces(self, ranges: list[Range]) -> list[Range]:
        """One entry for each chunk to be made."""
        pieces: list[Range] = []
        for offset, size in ranges:
            for piece in chunk_sizes(size, self._driver.granularity, self.largest_chunk_bytes):
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


def chunk_sizes(size: int, granularity: int, largest: int = LARGEST_CHUNK) -> list[int]:
    """How to cut `size` bytes, a multiple of `granularity`, into few chunks: largest first.

    As many of the greatest granularity × 2^k that `largest` allows as fit, then halving for the
    rest: a tail never needs two of one size. A granularity above `largest` is its own largest.
    """
    if granularity < 1 or size < 0 or size % granularity:
        raise CacheError(f"cannot cut {size} bytes into granules of {granularity}")
    piece = granularity << (max(largest // granularity, 1).bit_length() - 1)
    sizes: list[int] = []
    while size:
        count, size = divmod(size, piece)
        sizes += [piece] * count
        piece //= 2
    return sizes
