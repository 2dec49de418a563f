"""Which registered regions the bytes of a box lie in, and whether boxes overlap. Pure numpy.

Both questions are asked of spans first: from the first byte of a block, or a page, to its last. A
span that lies in one region needs no look at what is inside it, and spans that do not meet have
nothing in common; only the few others are taken apart, an axis a turn. So a million runs of a few
boxes cost about as much as their pages do.

Facts that this file relies on, checked by the tests against byte sets:
- The first and the last byte of a span move, so a span tells which edges its bytes reach.
- Regions are disjoint and sorted: their starts ascend, and so do their ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import RegionError
from kvxfer.transfer.boxes import Stretches, spread
from kvxfer.transfer.regions import Int64Array, RegionSet
from kvxfer.transfer.runs import cut

Mask = NDArray[np.bool_]

FEW = 64
"""Spans that are looked up one by one: numpy's calls cost as much as about so many."""
_LIMIT = 1 << 62
"""No cache reaches so far; sums below it do not wrap round."""


def crossed_edges(parts: Sequence[Stretches], regions: RegionSet, what: str) -> Int64Array:
    """Ascending offsets where one region ends, the next starts, and bytes of `parts` lie on either
    side: runs are cut there. Often there are none.

    Raises RegionError, which names `what`, where a byte lies in no region.
    """
    starts: list[Int64Array] = []
    ends: list[Int64Array] = []
    for part in parts:
        if len(part.starts):
            _check_limits(part, regions, what)
            for first, last in _reached(part, regions, what):
                starts += [first] if len(first) else []
                ends += [last] if len(last) else []
    if not starts or not ends:
        return np.zeros(0, dtype=np.int64)
    return np.intersect1d(np.concatenate(starts), np.concatenate(ends))


def _check_limits(part: Stretches, regions: RegionSet, what: str) -> None:
    lowest, highest = int(part.starts.min()), int(part.starts.max())
    if lowest < 0 or highest + part.span_bytes() > _LIMIT:
        offset = lowest if lowest < 0 else highest
        raise RegionError(
            f"{what}: bytes [{offset}, +{part.span_bytes()}) lie in no registered region "
            f"({len(regions.regions)} regions, generation {regions.generation})"
        )


def _reached(part: Stretches, regions: RegionSet, what: str) -> list[tuple[Int64Array, Int64Array]]:
    """Starts of regions at which spans start, and ends of regions at which spans end."""
    reached: list[tuple[Int64Array, Int64Array]] = []
    offsets, outer = part.ascending()
    for level in range(outer, len(part.extents) + 1):
        if len(offsets) <= FEW:
            found = _few_inside(offsets, part.span_bytes(level), regions)
            if found is not None:
                return [*reached, found]
            if level < len(part.extents):
                offsets = _expand(offsets, part, level)
                continue
        inside, first, last = _inside(offsets, part.span_bytes(level), regions)
        reached.append((first, last))
        offsets = offsets[~inside]
        if not len(offsets):
            return reached
        if level < len(part.extents):
            offsets = _expand(offsets, part, level)
    sizes = np.full(len(offsets), part.size_bytes, dtype=np.int64)
    parent, start, size = cut(offsets, sizes, regions.starts)
    offsets = offsets[parent] + start
    regions.check_covers(offsets, size, what)
    ends = offsets + size
    reached.append((offsets[np.isin(offsets, regions.starts)], ends[np.isin(ends, regions.ends)]))
    return reached


def _few_inside(
    offsets: Int64Array, span: int, regions: RegionSet
) -> tuple[Int64Array, Int64Array] | None:
    """What `_inside` finds where all of a few lie in one region each, at a tenth of the cost; None
    where not all do."""
    starts, ends = regions.bounds
    first, last = [], []
    for offset in offsets.tolist():
        index = bisect_right(starts, offset) - 1
        if index < 0 or offset + span > ends[index]:
            return None
        if offset == starts[index]:
            first.append(offset)
        if offset + span == ends[index]:
            last.append(offset + span)
    return np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def _inside(
    offsets: Int64Array, span: int, regions: RegionSet
) -> tuple[Mask, Int64Array, Int64Array]:
    """Which [offset, +span), in ascending order, lie in one region each; and the starts and the
    ends of regions that those reach.

    Looks regions up among the offsets, of which there are many more.
    """
    near = slice(
        int(np.searchsorted(regions.ends, offsets[0], side="right")),
        int(np.searchsorted(regions.starts, offsets[-1], side="right")),
    )
    starts, ends = regions.starts[near], regions.ends[near]
    first = np.searchsorted(offsets, starts, side="left")
    behind = np.searchsorted(offsets, ends - span, side="right")
    some = np.flatnonzero(first < behind)
    starts, ends, first, behind = starts[some], ends[some], first[some], behind[some]
    if int((behind - first).sum()) == len(offsets):
        inside = np.ones(len(offsets), dtype=np.bool_)
    else:
        steps = np.zeros(len(offsets) + 1, dtype=np.int8)
        np.add.at(steps, first, 1)
        np.add.at(steps, behind, -1)
        inside = np.cumsum(steps[:-1], dtype=np.int8) > 0
    return inside, starts[offsets[first] == starts], ends[offsets[behind - 1] + span == ends]


def first_overlap(parts: Sequence[Stretches]) -> int | None:
    """The lowest offset at which a stretch starts inside another that starts no later, or None.

    Sizes must be positive; offsets and sums fit in int64 (`crossed_edges` has checked them).
    """
    pools, levels = [], []
    for part in parts:
        offsets, outer = part.ascending()
        pools.append(offsets)
        levels.append(outer)
    while True:
        spans = [part.span_bytes(level) for part, level in zip(parts, levels, strict=True)]
        clashing = _clashing(pools, spans)
        taken_apart = False
        for index, part in enumerate(parts):
            level = levels[index]
            if level < len(part.extents) and len(pools[index]):
                # Axes that do not nest may overlap by themselves: such a span proves nothing.
                nested = all(
                    part.strides[i] >= part.span_bytes(i + 1)
                    for i in range(level, len(part.extents))
                )
                kept = pools[index][clashing[index]] if nested else pools[index]
                pools[index] = _expand(kept, part, level) if len(kept) else kept
                levels[index] += 1
                taken_apart |= len(kept) > 0
            else:
                pools[index] = pools[index][clashing[index]]
        if not taken_apart:
            found = [pool for pool in pools if len(pool)]
            return _second(np.concatenate(found)) if found else None


def _second(offsets: Int64Array) -> int:
    """Where the second of the lowest two that overlap starts: all of `offsets` overlap some."""
    return int(np.sort(offsets)[1])


def _clashing(pools: Sequence[Int64Array], spans: Sequence[int]) -> list[Mask]:
    """Pool by pool, which spans share a byte with another of any pool."""
    if not pools:
        return []
    offsets = np.concatenate(pools)
    sizes = np.repeat(np.array(spans, dtype=np.int64), [len(pool) for pool in pools])
    order = np.argsort(offsets, kind="stable")
    offsets = offsets[order]
    reach = np.maximum.accumulate(offsets + sizes[order])
    meets = offsets[1:] < reach[:-1]
    sorted_clash = np.zeros(len(offsets), dtype=np.bool_)
    sorted_clash[1:] |= meets
    sorted_clash[:-1] |= meets
    clash = np.empty_like(sorted_clash)
    clash[order] = sorted_clash
    return np.split(clash, np.cumsum([len(pool) for pool in pools])[:-1])


def _expand(offsets: Int64Array, part: Stretches, level: int) -> Int64Array:
    """The starts of what `part`'s axis `level` holds at each offset, ascending."""
    found = spread(offsets, part.extents[level : level + 1], part.strides[level : level + 1])
    return found if (found[1:] >= found[:-1]).all() else np.sort(found, kind="stable")
