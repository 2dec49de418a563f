"""The ends of a hand-over, as grants and leases name them."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.footprint import prompt_entries
from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import PlanError
from kvxfer.transfer.plan import CacheSide
from kvxfer.transfer.regions import RegionSet


def cache_sides(
    geometry: CacheGeometry,
    regions: RegionSet,
    blocks: Sequence[Sequence[int]],
    num_prompt: int,
    held: Sequence[range] | None = None,
    moved: Sequence[range] | None = None,
    num_cached: int = 0,
) -> list[CacheSide]:
    """One end of the hand-over of a prompt's KV, group by group: `blocks` are those of the entries
    that have to be brought, in blocks of this end's own sizes; the first `num_cached` tokens need
    not be. What travels between ends of different block sizes, `travelling` tells.

    `held` are the heads of the model that this shard has (`shards.head_range`; default: from 0 on),
    `moved` those of them that take part (`shards.sources_of`; default: all that both ends hold).

    Raises PlanError when blocks, or the heads of a group, are not as many.
    """
    entries = prompt_entries(geometry.specs, num_prompt, num_cached)
    if [len(ids) for ids in blocks] != [len(kept) for kept in entries]:
        expected = [len(kept) for kept in entries]
        raise PlanError(f"{[len(ids) for ids in blocks]} blocks are named, not {expected}")
    shards = [range(spec.num_kv_heads) for spec in geometry.specs] if held is None else held
    if [len(heads) for heads in shards] != [spec.num_kv_heads for spec in geometry.specs]:
        expected = [spec.num_kv_heads for spec in geometry.specs]
        raise PlanError(f"heads: {list(shards)} are not those of a shard of {expected} by group")
    taking_part = [None] * len(shards) if moved is None else moved
    if len(taking_part) != len(shards):
        raise PlanError(f"heads: {list(taking_part)} take part, of {len(shards)} groups")
    return [
        CacheSide(group, regions, ids, kept.start, heads.start, part)
        for group, ids, kept, heads, part in zip(
            geometry.groups, blocks, entries, shards, taking_part, strict=True
        )
    ]


def why_not_blocks(
    geometry: CacheGeometry,
    blocks: Sequence[Sequence[int]],
    num_prompt: int,
    num_cached: int = 0,
) -> str:
    """Why a peer cannot have meant `blocks` of its cache for a prompt's hand-over, or '', where the
    first `num_cached` tokens, not all of them, are not handed over."""
    entries = prompt_entries(geometry.specs, num_prompt, num_cached)
    if [len(ids) for ids in blocks] != [len(kept) for kept in entries]:
        named, needed = [len(ids) for ids in blocks], list(map(len, entries))
        return f"{named} blocks for tokens [{num_cached}, {num_prompt}), which need {needed}"
    for group, ids in zip(geometry.groups, blocks, strict=True):
        if not all(0 < block < group.capacity_blocks for block in ids):
            return "names the null block or one beyond the capacity"
        if len(set(ids)) != len(ids):
            return "names a block twice"
    return ""
