"""Which KV heads a rank of a tensor-parallel worker holds, and whom it gets them from. Pure.

Both ends of a transfer compute these, from the two tensor-parallel sizes alone: each destination
rank knows which source ranks it expects, each source rank to whom it owes what.

Facts that this file relies on:
- Up to as many ranks as KV heads, each holds a row of neighbouring heads; beyond, each head has
  equally many holders, neighbouring ranks (read in vLLM's QKVParallelLinear: a rank's head is
  rank // replicas). MLA has one latent vector a token, its one head: every rank holds it.
- Where replicas hold a head, their bytes are the same, so any of them may be the source.
"""

from __future__ import annotations

from functools import lru_cache

from kvxfer.errors import PlanError

RankHeads = tuple[int, range]
"""A rank, and heads in the model's numbers."""


@lru_cache(maxsize=1024)
def head_range(rank: int, size: int, num_kv_heads: int) -> range:
    """The heads that `rank` of `size` holds, in the model's numbers.

    Raises PlanError when heads and ranks do not divide, or the rank is none of them.
    """
    if num_kv_heads < 1:
        raise PlanError(f"num_kv_heads: {num_kv_heads} must be at least 1")
    if size < 1:
        raise PlanError(f"tensor_parallel_size: {size} must be at least 1")
    if not 0 <= rank < size:
        raise PlanError(f"rank: {rank} is not among tensor_parallel_size {size}")
    if max(size, num_kv_heads) % min(size, num_kv_heads):
        raise PlanError(
            f"tensor_parallel_size {size} and num_kv_heads {num_kv_heads}: neither is a multiple "
            f"of the other"
        )
    if size <= num_kv_heads:
        held = num_kv_heads // size
        return range(rank * held, (rank + 1) * held)
    head = rank // (size // num_kv_heads)
    return range(head, head + 1)


def sources_of(dst_rank: int, dst_size: int, src_size: int, num_kv_heads: int) -> list[RankHeads]:
    """Whom a destination rank expects heads from, and which: each of its heads from exactly one,
    by ascending rank. Raises PlanError as `head_range`.

    Where a head has several holders on either side, the destination's are spread over the
    source's: their numbers differ by one at the most. Equal sizes pair each rank with its own.
    """
    head_range(0, src_size, num_kv_heads)
    found: dict[int, range] = {}
    for head in head_range(dst_rank, dst_size, num_kv_heads):
        src_rank = _source_of_head(head, dst_rank, dst_size, src_size, num_kv_heads)
        found[src_rank] = range(found.get(src_rank, range(head, head)).start, head + 1)
    return list(found.items())


def destinations_of(
    src_rank: int, src_size: int, dst_size: int, num_kv_heads: int
) -> list[RankHeads]:
    """To whom a source rank owes which heads: `sources_of`, seen from the other end.

    Empty for a replica that nobody needs. Raises PlanError as `head_range`.
    """
    head_range(src_rank, src_size, num_kv_heads)
    return [
        (dst_rank, heads)
        for dst_rank in range(dst_size)
        for source, heads in sources_of(dst_rank, dst_size, src_size, num_kv_heads)
        if source == src_rank
    ]


def _source_of_head(
    head: int, dst_rank: int, dst_size: int, src_size: int, num_kv_heads: int
) -> int:
    """Which of the ranks that hold `head` at the source sends it to `dst_rank`."""
    if src_size <= num_kv_heads:
        return head // (num_kv_heads // src_size)
    src_holders = src_size // num_kv_heads
    dst_holders = max(1, dst_size // num_kv_heads)
    which = dst_rank % dst_holders  # of the destination's holders of this head
    return head * src_holders + which * src_holders // dst_holders
