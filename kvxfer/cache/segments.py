"""The committed prefix that all segments of one group share, and which chunks lie where in it."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.cache.layout import GroupGeometry
from kvxfer.errors import CacheError, CapacityExceeded
from kvxfer.memory.chunks import Chunk


class GroupSegments:
    """`size`: the committed bytes of each segment, whole granules. Owns no memory: its cache does,
    and moves `size` when it has committed or released."""

    def __init__(self, geometry: GroupGeometry) -> None:
        self.geometry = geometry
        self.size = 0

    @property
    def blocks(self) -> int:
        """Blocks of which every byte is backed, the null block included."""
        return self.geometry.blocks_backed_by(self.size)

    @property
    def total_bytes(self) -> int:
        return self.geometry.num_segments * self.size

    def end_for(self, num_blocks: int) -> int:
        """What `size` has to be for `num_blocks` blocks; never less than it is."""
        geometry = self.geometry
        if num_blocks > geometry.capacity_blocks:
            raise CapacityExceeded(
                f"cache: {num_blocks} blocks asked for, {geometry.capacity_blocks} are reserved"
            )
        return max(self.size, geometry.committed_bytes_per_segment(num_blocks))

    def missing(self, end: int) -> list[tuple[int, int]]:
        """(offset, size) in each segment of what lies between `size` and `end`."""
        if end <= self.size:
            return []
        geometry, added = self.geometry, end - self.size
        starts = (geometry.segment_offset(segment) for segment in range(geometry.num_segments))
        return [(start + self.size, added) for start in starts]

    def own(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        geometry = self.geometry
        return [chunk for chunk in chunks if geometry.offset <= chunk.offset < geometry.end]

    def edge(self, num_blocks: int, chunks: Iterable[Chunk]) -> int:
        """The first edge of chunks, in all segments the same, behind the first `num_blocks`."""
        if num_blocks < 1:
            raise CacheError(f"cannot shrink to {num_blocks} blocks: the null block stays")
        needed = self.geometry.committed_bytes_per_segment(num_blocks)
        # Chunks that reach across an edge rule it out.
        starts = [(self.geometry.offset_in_segment(c.offset), c.size) for c in self.own(chunks)]
        edges = {start + size for start, size in starts if needed <= start + size <= self.size}
        for edge in sorted(edges):
            if not any(start < edge < start + size for start, size in starts):
                return edge
        return self.size

    def beyond(self, edge: int, chunks: Iterable[Chunk]) -> list[Chunk]:
        """The chunks that lie, in every segment, at or above `edge`."""
        return [c for c in self.own(chunks) if self.geometry.offset_in_segment(c.offset) >= edge]

    def mergeable(self, chunks: Iterable[Chunk], largest: int) -> list[list[Chunk]]:
        """Neighbours within a segment that together are no larger than `largest`."""
        runs: list[list[Chunk]] = []
        room = 0
        for chunk in self.own(chunks):
            is_first = self.geometry.offset_in_segment(chunk.offset) == 0
            follows = runs and runs[-1][-1].end == chunk.offset and not is_first
            if follows and chunk.size <= room:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
                room = largest
            room -= chunk.size
        return [run for run in runs if len(run) > 1]
