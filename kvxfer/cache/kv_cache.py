"""The growable KV cache of one worker: reserve, commit a first granule, extend, extend again.

    segment 0                     segment 1                     (one stretch per outer index)
    ├─ committed ─┤╌╌ reserved ╌╌╌┼─ committed ─┤╌╌ reserved ╌╌╌┤
    0             c              seg          seg+c             2·seg

Block b lies at the same distance from the start of each segment for ever, so growth adds bytes
behind the committed prefix of every segment and moves none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvxfer.cache.layout import CacheGeometry
from kvxfer.cache.views import layer_views
from kvxfer.errors import CapacityExceeded
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.extensible_tensor import ExtensibleTensor
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
    """Owns the reservation and its chunks. Not thread-safe: its worker serialises the calls."""

    def __init__(self, driver: VmmDriver, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.buffer = VirtualBuffer(driver, geometry.total_bytes)
        dtype: torch.dtype = getattr(torch, geometry.spec.dtype)
        self.views = layer_views(ExtensibleTensor(self.buffer, dtype), geometry)
        self._segment_bytes = 0

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
        geometry = self.geometry
        if num_blocks > geometry.capacity_blocks:
            raise CapacityExceeded(
                f"cache: {num_blocks} blocks asked for, {geometry.capacity_blocks} are reserved"
            )
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

    def close(self) -> None:
        """Release all memory and addresses; the views must not be touched again. Idempotent."""
        self._segment_bytes = 0
        self.buffer.close()


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
