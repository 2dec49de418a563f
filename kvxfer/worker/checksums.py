"""The checksum of a prompt's KV in one cache, or in one rank's part of it: parts add up."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.footprint import prompt_entries, travelling
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.checksum import combined, kv_checksum
from kvxfer.transfer.checksum_shard import KVShard


def checksum_of(
    shards: Sequence[KVShard],
    specs: Sequence[KVCacheSpec],
    blocks: Sequence[Sequence[int]],
    num_prompt: int,
    theirs: Sequence[KVCacheSpec],
    counts: Sequence[bool],
    num_cached: int = 0,
) -> int:
    """Of what travels to or from a cache of `theirs`, in the groups that count here; all is given
    group by group, `blocks` as `transfer.sides.cache_sides` wants them."""
    tokens = travelling(specs, num_prompt, range(num_cached, num_prompt), theirs)
    entries = prompt_entries(specs, num_prompt, num_cached)
    groups = zip(shards, blocks, tokens, entries, counts, strict=True)
    return combined(
        kv_checksum(shard, ids, moved, first_entry=kept.start)
        for shard, ids, moved, kept, is_counted in groups
        if moved and is_counted
    )
