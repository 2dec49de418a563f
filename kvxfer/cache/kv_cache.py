"""The growable KV cache of one worker: reserve, commit a first granule, extend, shrink, sleep.

    segment 0                     segment 1                     (one stretch per outer index)
    ├─ committed ─┤╌╌ reserved ╌╌╌┼─ committed ─┤╌╌ reserved ╌╌╌┤
    0             c              seg          seg+c             2·seg

Block b lies at the same distance from the start of each segment for ever, so growth adds bytes
behind the committed prefix of every segment and moves none; shrinking takes them from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvxfer.cache.layout import CacheGeometry
from kvxfer.cache.views import layer_views
from kvxfer.errors import CacheAwake, CacheError, CacheSleeps, CapacityExceeded, MemoryPinned
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.extensible_tensor import ExtensibleTensor, tensor_over
from kvxfer.memory.virtual_buffer import Chunk, VirtualBuffer

GROWTH_FACTOR = 1.5
"""An elastic cache grows at least by this factor: its chunks, each an open descriptor on the host,
stay few, and a small cache grows in small steps."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What one growth added: blocks [old_blocks, new_blocks) and the chunks behind them."""

    old_blocks: int
    new_blocks: int
    chunks: tuple[Chunk, ...]


class KVCache:
    """Owns the reservation and its chunks. Not thread-safe: its worker serialises the calls.

    While it sleeps it has addresses and no memory, and all but `wake`, `bury` and `close` raises
    CacheSleeps. Should the driver refuse to release a chunk, its error is raised with the bound
    lowered all the same; what is left above the bound goes with the next call, or with `close`.
    """

    def __init__(self, driver: VmmDriver, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.buffer = VirtualBuffer(driver, geometry.total_bytes)
        dtype: torch.dtype = getattr(torch, geometry.spec.dtype)
        self._views = layer_views(ExtensibleTensor(self.buffer, dtype), geometry)
        self._segment_bytes = 0
        self._slept_blocks = 0
        self.is_asleep = False

    @property
    def views(self) -> list[torch.Tensor]:
        """One [capacity_blocks, H, N, C] per layer: the same ones through growth and sleep."""
        self._check_awake("its views cannot be touched")
        return self._views

    @property
    def committed_blocks(self) -> int:
        """Blocks of which every byte is backed, the null block included."""
        return self.geometry.blocks_backed_by(self._segment_bytes)

    @property
    def committed_bytes(self) -> int:
        return self.geometry.num_segments * self._segment_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.geometry.total_bytes

    def extend(self, num_blocks: int) -> Extension:
        """Back at least the first `num_blocks` blocks; all segments or none (DriverError).

        Raises CapacityExceeded beyond the reservation. Fewer than are committed: adds nothing.
        """
        self._check_awake(f"it cannot be extended to {num_blocks} blocks")
        geometry = self.geometry
        if num_blocks > geometry.capacity_blocks:
            raise CapacityExceeded(
                f"cache: {num_blocks} blocks asked for, {geometry.capacity_blocks} are reserved"
            )
        self.buffer.decommit(self._beyond(self._segment_bytes))
        old_blocks, start = self.committed_blocks, self._segment_bytes
        end = geometry.committed_bytes_per_segment(num_blocks)
        if end <= start:
            return Extension(old_blocks, old_blocks, ())
        ranges = [
            (geometry.segment_offset(segment) + start, end - start)
            for segment in range(geometry.num_segments)
        ]
        chunks = self.buffer.commit(ranges)
        self._segment_bytes = end
        return Extension(old_blocks, self.committed_blocks, chunks)

    def retract(self, extension: Extension) -> None:
        """Take back the newest extension, of which nothing was used or registered yet."""
        if extension.chunks:
            self.buffer.decommit(extension.chunks)
            added = sum(chunk.size for chunk in extension.chunks)
            self._segment_bytes -= added // self.geometry.num_segments

    def above(self, num_blocks: int) -> tuple[Chunk, ...]:
        """What `shrink(num_blocks)` would release: the chunks that lie, in every segment, wholly
        above those that back the first `num_blocks` blocks."""
        self._check_awake("it has no memory to release")
        return tuple(self._beyond(self._edge(num_blocks)))

    def blocks_after_shrink(self, num_blocks: int) -> int:
        """`committed_blocks` after `shrink(num_blocks)`: a chunk with the bound in it is kept."""
        return self.geometry.blocks_backed_by(self._edge(num_blocks))

    def shrink(self, num_blocks: int, *, is_reachable: bool = False) -> tuple[Chunk, ...]:
        """Release `above(num_blocks)`; returns what was released.

        Nobody uses blocks from `blocks_after_shrink(num_blocks)` on. `is_reachable`: a lost peer
        may still touch them, so they become tombstones, or MemoryPinned is raised.
        """
        gone = self.above(num_blocks)
        self._check_retirable(gone, is_reachable)
        self._segment_bytes = self._edge(num_blocks)
        self._release(gone, is_reachable)
        return gone

    def sleep(self, *, is_reachable: bool = False) -> None:
        """Release all memory and contents; addresses and views stay. `is_reachable` as above."""
        self._check_awake("it cannot be put to sleep again")
        gone = self.buffer.chunks
        self._check_retirable(gone, is_reachable)
        self._slept_blocks, self._segment_bytes = self.committed_blocks, 0
        self.is_asleep = True
        self._release(gone, is_reachable)

    def wake(self) -> Extension:
        """Back as many blocks as before `sleep`, packed in few chunks; their contents are gone.

        Raises DriverError, and sleeps on, where there is no memory for them.
        """
        if not self.is_asleep:
            raise CacheAwake(f"cache: awake, with {self.committed_blocks} blocks committed")
        self.is_asleep = False
        try:
            return self.extend(self._slept_blocks)
        except BaseException:
            self.is_asleep = True
            raise

    def defragment(self) -> int:
        """Pack each segment's committed bytes into few large chunks; returns how many are left.

        Contents, addresses and views stay; nothing, local or remote, touches them meanwhile. Needs
        the memory of one large chunk more for a while. After an error every byte is where it was,
        in the old chunks or, for what was done before, in new ones.
        """
        self._check_awake("it has nothing to defragment")
        for group in self._mergeable():
            self.buffer.merge(group, self._copy)
        return len(self.buffer.chunks)

    def bury(self) -> None:
        """No lost peer is left that could touch tombstones: have them fault again."""
        self.buffer.bury()

    def close(self) -> None:
        """Release all memory and addresses; the views must not be touched again. Idempotent."""
        self._segment_bytes = 0
        self.buffer.close()

    def _check_awake(self, consequence: str) -> None:
        if self.is_asleep:
            blocks = self._slept_blocks
            raise CacheSleeps(f"cache: sleeps, {blocks} blocks when awake: {consequence}")

    def _check_retirable(self, chunks: Iterable[Chunk], is_reachable: bool) -> None:
        size = sum(chunk.size for chunk in chunks)
        if size and is_reachable and not self.buffer.can_retire:
            raise MemoryPinned(f"cache: a lost peer may still reach {size} bytes: they stay mapped")

    def _release(self, chunks: Iterable[Chunk], is_reachable: bool) -> None:
        if is_reachable and self.buffer.can_retire:
            self.buffer.retire(chunks)
        else:
            self.buffer.decommit(chunks)

    def _edge(self, num_blocks: int) -> int:
        """The first edge of chunks, in all segments the same, behind the first `num_blocks`."""
        if num_blocks < 1:
            raise CacheError(f"cannot shrink to {num_blocks} blocks: the null block stays")
        stride = self.geometry.segment_stride_bytes
        needed = self.geometry.committed_bytes_per_segment(num_blocks)
        # Chunks that reach across an edge rule it out.
        inside = [(c.offset % stride, c.offset % stride + c.size) for c in self.buffer.chunks]
        edges = {end for _, end in inside if needed <= end <= self._segment_bytes}
        for edge in sorted(edges):
            if not any(start < edge < end for start, end in inside):
                return edge
        return self._segment_bytes

    def _beyond(self, edge: int) -> list[Chunk]:
        stride = self.geometry.segment_stride_bytes
        return [chunk for chunk in self.buffer.chunks if chunk.offset % stride >= edge]

    def _mergeable(self) -> list[list[Chunk]]:
        """Neighbours within a segment that together are no larger than the largest chunk."""
        groups: list[list[Chunk]] = []
        stride, room = self.geometry.segment_stride_bytes, 0
        for chunk in self.buffer.chunks:
            follows = groups and groups[-1][-1].end == chunk.offset and chunk.offset % stride
            if follows and chunk.size <= room:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
                room = self.buffer.largest_chunk_bytes
            room -= chunk.size
        return [group for group in groups if len(group) > 1]

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        device = self.buffer.device
        tensor_over(target, size_bytes, device).copy_(tensor_over(source, size_bytes, device))
        if device != "cpu":
            torch.cuda.synchronize(device)


def next_growth(
    geometry: CacheGeometry, committed_blocks: int, needed_blocks: int, bound_blocks: int
) -> int:
    """The block count to extend to so that `needed_blocks` fit, at most `bound_blocks`.

    At least half as much again as is committed, so that steps are few. What a step adds to a
    segment is rounded up to a power of two of granules and cut back to whole blocks: one small
    chunk, where `_grows_in_powers_of_two`.
    """
    start_bytes = geometry.committed_bytes_per_segment(committed_blocks)
    wanted = max(needed_blocks, math.ceil(committed_blocks * GROWTH_FACTOR))
    added_bytes = geometry.committed_bytes_per_segment(wanted) - start_bytes
    unit = geometry.granularity
    while unit * 2 <= added_bytes:
        unit *= 2
    added_bytes = -(-added_bytes // unit) * unit
    return min(bound_blocks, geometry.blocks_backed_by(start_bytes + added_bytes))


def open_files_needed(geometry: CacheGeometry, bound_blocks: int, largest_chunk: int) -> int:
    """The most chunks, each one descriptor on the host, that growth to `bound_blocks` comes to.

    Any step may cost one chunk of each size below the largest; the first granule, the first
    extension and the last step, which the bound cuts short, are not rounded.
    """
    segment_bytes = geometry.committed_bytes_per_segment(bound_blocks)
    small_sizes = min(largest_chunk, segment_bytes) // geometry.granularity
    most_small = max(1, small_sizes.bit_length())
    first = max(1, geometry.blocks_backed_by(geometry.committed_bytes_per_segment(1)))
    steps = math.ceil(math.log(max(1.0, bound_blocks / first), GROWTH_FACTOR)) + 1
    small_per_step = 1 if _grows_in_powers_of_two(geometry) else most_small
    small = 3 * most_small + steps * small_per_step
    return geometry.num_segments * (small + segment_bytes // largest_chunk)


def _grows_in_powers_of_two(geometry: CacheGeometry) -> bool:
    """Whether whole blocks end where a power of two of granules does."""
    granules, rest = divmod(geometry.segment_block_bytes, geometry.granularity)
    return granules == 0 or (rest == 0 and granules & (granules - 1) == 0)
