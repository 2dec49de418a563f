"""The ends of a hand-over, as grants and leases name them."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.footprint import prompt_entries
from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import PlanError
from kvxfer.transfer.plan import CacheSide
from kvxfer.transfer.regions import RegionSet


def cache_sides(
    geometry: CacheGeometry, regions: RegionSet, blocks: Sequence[Sequence[int]], num_prompt: int
) -> list[CacheSide]:
    """One end of the hand-over of a prompt's KV, group by group: `blocks` are those of the entries
    that have to be brought. Raises PlanError when they are not as many."""
    entries = prompt_entries(geometry.specs, num_prompt)
    if [len(ids) for ids in blocks] != [len(kept) for kept in entries]:
        expected = [len(kept) for kept in entries]
        raise PlanError(f"{[len(ids) for ids in blocks]} blocks are named, not {expected}")
    return [
        CacheSide(group, regions, ids, kept.start)
        for group, ids, kept in zip(geometry.groups, blocks, entries, strict=True)
    ]


def why_not_blocks(
    geometry: CacheGeometry, blocks: Sequence[Sequence[int]], num_prompt: int
) -> str:
    """Why a peer cannot have meant `blocks` of its cache for a prompt's hand-over, or ''."""
    entries = prompt_entries(geometry.specs, num_prompt)
    if [len(ids) for ids in blocks] != [len(kept) for kept in entries]:
        named = [len(ids) for ids in blocks]
        return f"{named} blocks for {num_prompt} tokens, which need {list(map(len, entries))}"
    for group, ids in zip(geometry.groups, blocks, strict=True):
        if not all(0 < block < group.capacity_blocks for block in ids):
            return "names the null block or one beyond the capacity"
        if len(set(ids)) != len(ids):
            return "names a block twice"
    return ""
