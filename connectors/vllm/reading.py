"""From two block tables to what one pull has to name. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import PlanError


@dataclass(frozen=True, slots=True)
class Reading:
    """Arguments of `Endpoint.pull`: neighbouring entries of both tables, and tokens counted from
    the first token of those."""

    src_blocks: list[int]
    dst_blocks: list[int]
    tokens: range


def reading_of(
    src: Sequence[int],
    dst: Sequence[int],
    sizes: tuple[int, int],
    tokens: range,
    window: int,
) -> Reading | None:
    """Of a group's tables, from token 0 on, 0 where a sliding window has passed: what brings
    `tokens` to where `dst` has blocks; None where it has none. `sizes`: tokens in a block of each
    side's.

    Raises PlanError where the source has not kept what the last of `tokens` sees.
    """
    end, large = tokens.stop, max(sizes)
    ours = _first_held(dst, sizes[1], end)
    start = max(tokens.start, ours)
    theirs = _first_held(src, sizes[0], end)
    if theirs > start:
        if not window or theirs > max(tokens.start, end - window):
            raise PlanError(f"the producer has kept tokens {theirs} to {end} of {start} to {end}")
        start = theirs
    if start >= end:
        return None
    base = start // large * large
    if base < max(ours, theirs):  # the table's first entries there are gone on one side
        base = start = base + large
        if not window or start > end - window:
            raise PlanError(f"tokens before {start} have no block on one of the sides")
    return Reading(
        list(src[base // sizes[0] : -(-end // sizes[0])]),
        list(dst[base // sizes[1] : -(-end // sizes[1])]),
        range(start - base, end - base),
    )


def _first_held(blocks: Sequence[int], size: int, end: int) -> int:
    """The first token from which on all have blocks, up to `end`."""
    needed = -(-end // size)
    if needed > len(blocks):
        raise PlanError(f"{len(blocks)} blocks of {size} tokens do not hold {end} tokens")
    for entry in range(needed - 1, -1, -1):
        if blocks[entry] == 0:
            return (entry + 1) * size
    return 0
