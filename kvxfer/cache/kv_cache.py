"""The growable KV cache of one worker: reserve, commit a first granule, extend, shrink, sleep.

    segment 0                     segment 1                     (one stretch per outer index)
    ├─ committed ─┤╌╌ reserved ╌╌╌┼─ committed ─┤╌╌ reserved ╌╌╌┤
    0             c              seg          seg+c             2·seg

Block b lies at the same distance from the start of each segment for ever, so growth adds bytes
behind the committed prefix of every segment and moves none; shrinking takes them from there. The
groups of a cache lie one behind the other, each with segments, and a committed prefix, of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvxfer.cache.layout import CacheGeometry, GroupGeometry
from kvxfer.cache.segments import GroupSegments
from kvxfer.cache.views import layer_views
from kvxfer.errors import CacheAwake, CacheSleeps
from kvxfer.memory.chunks import Chunk
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.extensible_tensor import ExtensibleTensor, tensor_over
from kvxfer.memory.steps import Steps, finished
from kvxfer.memory.virtual_buffer import VirtualBuffer


@dataclass(frozen=True, slots=True)
class Extension:
    """What one growth added: of each group blocks [old_blocks, new_blocks), and the chunks."""

    old_blocks: tuple[int, ...]
    new_blocks: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class KVCache:
    """Owns the reservation and its chunks. Not thread-safe: its worker serialises the calls.

    Counts of blocks are given group by group. While it sleeps it has addresses and no memory, and
    all but `wake`, `bury` and `close` raises CacheSleeps. Should the driver refuse to release a
    chunk, its error is raised with the bound lowered all the same; what is left above the bound
    goes with the next call, or with `close`.
    """

    def __init__(self, driver: VmmDriver, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.buffer = VirtualBuffer(driver, geometry.total_bytes)
        self._groups = [GroupSegments(group) for group in geometry.groups]
        self._views = [_views(self.buffer, group) for group in geometry.groups]
        self._slept_blocks: tuple[int, ...] = ()
        self.is_asleep = False

    @property
    def views(self) -> list[list[torch.Tensor]]:
        """By group, one [capacity_blocks, H, N, C] per layer: the same ones through growth and
        sleep."""
        self._check_awake("its views cannot be touched")
        return self._views

    @property
    def committed_blocks(self) -> tuple[int, ...]:
        """Blocks of which every byte is backed, the null block included."""
        return tuple(group.blocks for group in self._groups)

    @property
    def committed_bytes(self) -> int:
        return sum(group.total_bytes for group in self._groups)

    @property
    def reserved_bytes(self) -> int:
        return self.geometry.total_bytes

    def extend(self, num_blocks: Sequence[int]) -> Extension:
        """Back at least the first `num_blocks` blocks; all segments or none (DriverError).

        Raises CapacityExceeded beyond the reservation. Fewer than are committed: adds nothing.
        """
        return finished(self.extending(num_blocks))

    def extending(self, num_blocks: Sequence[int]) -> Steps[Extension]:
        """As `extend`, a chunk a step; until its end the cache is as before, and nothing but its
        contents changes."""
        self._check_awake(f"it cannot be extended to {list(num_blocks)} blocks")
        ends = [group.end_for(n) for group, n in zip(self._groups, num_blocks, strict=True)]
        self.buffer.decommit(self._beyond([group.size for group in self._groups]))
        old_blocks = self.committed_blocks
        missing = [group.missing(end) for group, end in zip(self._groups, ends, strict=True)]
        ranges = [one for group in missing for one in group]
        chunks = (yield from self.buffer.committing(ranges)) if ranges else ()
        self._set_sizes(ends)
        return Extension(old_blocks, self.committed_blocks, chunks)

    def retract(self, extension: Extension) -> None:
        """Take back the newest extension, of which nothing was used or registered yet."""
        self.buffer.decommit(extension.chunks)
        for group in self._groups:
            added = sum(chunk.size for chunk in group.own(extension.chunks))
            group.size -= added // group.geometry.num_segments

    def above(self, num_blocks: Sequence[int]) -> tuple[Chunk, ...]:
        """What `shrink(num_blocks)` would release: the chunks that lie, in every segment, wholly
        above those that back the first `num_blocks` blocks."""
        self._check_awake("it has no memory to release")
        return tuple(self._beyond(self._edges(num_blocks)))

    def blocks_after_shrink(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        """`committed_blocks` after `shrink(num_blocks)`: a chunk with the bound in it is kept."""
        edges = zip(self.geometry.groups, self._edges(num_blocks), strict=True)
        return tuple(group.blocks_backed_by(edge) for group, edge in edges)

    def shrink(self, num_blocks: Sequence[int], *, is_reachable: bool = False) -> tuple[Chunk, ...]:
        """Release `above(num_blocks)`; returns what was released.

        Nobody uses blocks from `blocks_after_shrink(num_blocks)` on. `is_reachable`: a lost peer
        may still touch them, so they become tombstones, or stay mapped, pinned, until `bury`.
        """
        gone = self.above(num_blocks)
        self._set_sizes(self._edges(num_blocks))
        self._release(gone, is_reachable)
        return gone

    def sleep(self, *, is_reachable: bool = False) -> None:
        """Release all memory and contents; addresses and views stay. `is_reachable` as above."""
        self._check_awake("it cannot be put to sleep again")
        gone = self.buffer.chunks
        self._slept_blocks = self.committed_blocks
        self._set_sizes([0] * len(self._groups))
        self.is_asleep = True
        self._release(gone, is_reachable)

    def wake(self) -> Extension:
        """Back as many blocks as before `sleep`, packed in few chunks; their contents are gone.

        Raises DriverError, and sleeps on, where there is no memory for them, MemoryPinned where a
        lost peer may still reach what was at their addresses.
        """
        if not self.is_asleep:
            raise CacheAwake(f"cache: awake, with {list(self.committed_blocks)} blocks committed")
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
        largest = self.buffer.largest_chunk_bytes
        for group in self._groups:
            for run in group.mergeable(self.buffer.chunks, largest):
                self.buffer.merge(run, self._copy)
        return len(self.buffer.chunks)

    def bury(self) -> None:
        """No lost peer is left that could touch tombstones, or what is pinned: release it."""
        self.buffer.bury()

    def close(self) -> None:
        """Give everything back. Views must not be touched afterwards. Idempotent."""
        self.buffer.close()
        self._set_sizes([0] * len(self._groups))

    def _check_awake(self, consequence: str) -> None:
        if self.is_asleep:
            blocks = list(self._slept_blocks)
            raise CacheSleeps(f"cache: sleeps, {blocks} blocks when awake: {consequence}")

    def _release(self, chunks: Iterable[Chunk], is_reachable: bool) -> None:
        if is_reachable:
            self.buffer.retire(chunks)
        else:
            self.buffer.decommit(chunks)

    def _set_sizes(self, sizes: Iterable[int]) -> None:
        for group, size in zip(self._groups, sizes, strict=True):
            group.size = size

    def _edges(self, num_blocks: Sequence[int]) -> list[int]:
        pairs = zip(self._groups, num_blocks, strict=True)
        return [group.edge(blocks, self.buffer.chunks) for group, blocks in pairs]

    def _beyond(self, edges: Sequence[int]) -> list[Chunk]:
        pairs = zip(self._groups, edges, strict=True)
        return [chunk for group, edge in pairs for chunk in group.beyond(edge, self.buffer.chunks)]

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        device = self.buffer.device
        tensor_over(target, size_bytes, device).copy_(tensor_over(source, size_bytes, device))
        if device != "cpu":
            torch.cuda.synchronize(device)


def _views(buffer: VirtualBuffer, group: GroupGeometry) -> list[torch.Tensor]:
    dtype: torch.dtype = getattr(torch, group.spec.dtype)
    return layer_views(ExtensibleTensor(buffer, dtype), group)
