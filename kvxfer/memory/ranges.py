"""Ranges of bytes, and sets of them as sorted, disjoint tuples. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes [offset, offset + size) of a buffer."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """What disjoint `ranges` cover, neighbours as one."""
    found: list[Range] = []
    for item in sorted(ranges):
        if found and found[-1].end == item.offset:
            found[-1] = Range(found[-1].offset, found[-1].size + item.size)
        else:
            found.append(item)
    return tuple(found)


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """What is left of sorted, disjoint `ranges` where the disjoint `taken` are cut out."""
    left = list(ranges)
    for hole in taken:
        cut: list[Range] = []
        for item in left:
            before = min(item.end, hole.offset) - item.offset
            after = item.end - max(item.offset, hole.end)
            if before >= item.size or after >= item.size:
                cut.append(item)
                continue
            if before > 0:
                cut.append(Range(item.offset, before))
            if after > 0:
                cut.append(Range(hole.end, after))
        left = cut
    return tuple(left)
