"""How far a cache may grow, and in which steps: what a measured budget means in blocks of groups.

The groups of a cache share one budget. Each is sure of its *floor*, what the longest sequence needs
of it; beyond that, blocks go to the group that asks first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.cache.layout import CacheGeometry, GroupGeometry

GROWTH_FACTOR = 1.5
"""An elastic cache grows at least by this factor: its chunks, each an open descriptor on the host,
stay few, and a small cache grows in small steps."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """`kv_bytes` of KV in the groups of `geometry`."""

    geometry: CacheGeometry
    kv_bytes: int
    step_tokens: int
    """Most tokens of a sequence that are computed at once."""

    def floors(self, num_tokens: int) -> list[int]:
        """Blocks of each group for the null block and one sequence of `num_tokens` tokens."""
        pairs = zip(self.geometry.groups, self._needed(num_tokens), strict=True)
        return [min(group.capacity_blocks, needed) for group, needed in pairs]

    def longest_sequence(self, limit: int) -> int:
        """Tokens of the longest sequence, at most `limit`, that fits if it is alone; 0: none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._holds(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _holds(self, num_tokens: int) -> bool:
        needed = self._needed(num_tokens)
        if self.geometry.bytes_of(needed) > self.kv_bytes:
            return False
        groups = zip(self.geometry.groups, needed, strict=True)
        return all(blocks <= group.capacity_blocks for group, blocks in groups)

    def _needed(self, num_tokens: int) -> list[int]:
        """With an encoder too: a decoder may answer a short prompt at length."""
        specs = self.geometry.specs
        return [1 + spec.blocks_held(num_tokens, self.step_tokens) for spec in specs]

    def clip(
        self, wanted: Sequence[int], committed: Sequence[int], floors: Sequence[int]
    ) -> list[int]:
        """`wanted` blocks of each group as far as the budget goes, earlier groups first; never
        fewer than are committed, and no other group's floor is touched."""
        granted = list(committed)
        for index, group in enumerate(self.geometry.groups):
            others = [max(*pair) for pair in zip(granted, floors, strict=True)]
            others[index] = 0
            spare = self.kv_bytes - self.geometry.bytes_of(others)
            limit = min(group.capacity_blocks, max(0, spare) // group.spec.block_bytes)
            granted[index] = max(granted[index], min(wanted[index], limit))
        return granted

    def shares(self, floors: Sequence[int], num_sequences: int) -> list[int]:
        """All of the budget, divided among the groups before anything is known of the requests.

        A group with a window has use for what `num_sequences` sequences hold and no more; together
        such groups get at most half of what the floors leave. The rest goes to the others in
        proportion to their floors, so that they run low together; of rounding, to the first.
        """
        windowed = [bool(group.spec.window) for group in self.geometry.groups]
        found = list(floors)
        if any(windowed) and not all(windowed):
            more = num_sequences - 1
            useful = [(n - 1) * more * w for n, w in zip(floors, windowed, strict=True)]
            found = self._raised(found, useful, min(0.5 * self._spare(found), self._bytes(useful)))
        takes = [not is_windowed or all(windowed) for is_windowed in windowed]
        one = [n if taking else 0 for n, taking in zip(floors, takes, strict=True)]
        found = self._raised(found, one, self._spare(found))
        first = takes.index(True)
        wanted = [*found[:first], self.geometry.groups[first].capacity_blocks, *found[first + 1 :]]
        return self.clip(wanted, found, floors)

    def _raised(self, found: list[int], more: list[int], num_bytes: float) -> list[int]:
        """`found`, and of `more` as many times as `num_bytes` pay for, within the capacities."""
        factor = num_bytes / max(1, self._bytes(more))
        raised = [n + int(extra * factor) for n, extra in zip(found, more, strict=True)]
        capacities = (group.capacity_blocks for group in self.geometry.groups)
        return [min(*pair) for pair in zip(raised, capacities, strict=True)]

    def _bytes(self, num_blocks: Sequence[int]) -> int:
        return self.geometry.bytes_of(num_blocks)

    def _spare(self, num_blocks: Sequence[int]) -> int:
        return max(0, self.kv_bytes - self._bytes(num_blocks))


def next_growth(
    geometry: GroupGeometry, committed_blocks: int, needed_blocks: int, bound_blocks: int
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


def open_files_needed(geometry: GroupGeometry, bound_blocks: int, largest_chunk: int) -> int:
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


def _grows_in_powers_of_two(geometry: GroupGeometry) -> bool:
    """Whether whole blocks end where a power of two of granules does."""
    granules, rest = divmod(geometry.segment_block_bytes, geometry.granularity)
    return granules == 0 or (rest == 0 and granules & (granules - 1) == 0)
