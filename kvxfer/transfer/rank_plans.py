"""The hand-over of one piece of KV between two workers of any tensor-parallel sizes: a move for
each pair of ranks that have heads in common. Pure.

    prefill of 1          decode of 2           block ids are the same on all ranks of a worker;
    rank 0: heads 0, 1 ──▶ rank 0: head 0       what differs between two pairs is the heads
                     └───▶ rank 1: head 1

Every destination rank gets each of its heads from exactly one source (`transfer.shards`). That the
moves of a piece bring every byte of it is checked by their sizes, which count from the boxes and
not from the heads: `RankPlans.moves` returns moves that cover the piece, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvxfer.cache.layout import CacheGeometry
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import PlanError
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_groups
from kvxfer.transfer.regions import RegionSet
from kvxfer.transfer.shards import head_range, sources_of
from kvxfer.transfer.sides import cache_sides

Blocks = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class RankMove:
    """What moves from one rank of the source to one of the destination. Offsets are relative to
    the bases of these two ranks' caches."""

    src_rank: int
    dst_rank: int
    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class WorkerSide:
    """One worker's end of a prompt's hand-over; all of its ranks have this geometry, these
    regions, and these blocks."""

    geometry: CacheGeometry
    """Of one rank: its share of the heads."""
    size: int
    """Ranks."""
    regions: RegionSet
    blocks: Blocks
    """As `transfer.sides.cache_sides` wants them."""
    num_cached: int = 0
    """Tokens of the prompt that the target has: `blocks` are of the entries behind them."""

    def held(self, rank: int, totals: Sequence[int]) -> list[range]:
        return [head_range(rank, self.size, total) for total in totals]

    def of_rank(
        self, rank: int, totals: Sequence[int], moved: Sequence[range], num_prompt: int
    ) -> list[CacheSide]:
        """Group by group, of which the heads `moved` take part."""
        held = self.held(rank, totals)
        named = self.geometry, self.regions, self.blocks, num_prompt
        return cache_sides(*named, held, moved, self.num_cached)


def num_holders(spec: KVCacheSpec, size: int) -> int:
    """Of `size` ranks, how many neighbours hold the same heads: all of them the one latent of an
    MLA group."""
    return size if spec.kind is GroupKind.MLA else spec.replicas


def total_heads(spec: KVCacheSpec, size: int) -> int:
    """KV heads of the model, of which each of `size` ranks holds those of `spec`. Raises PlanError
    where there cannot be so many replicas."""
    holders = num_holders(spec, size)
    if size % holders:
        raise PlanError(f"replicas: {holders} of each head are no share of {size} ranks")
    return spec.num_kv_heads * size // holders


class RankPlans:
    """What brings `tokens` to every rank of `target`, planned and checked once for all layers;
    `moves` takes out what is to move now."""

    def __init__(
        self, source: WorkerSide, target: WorkerSide, num_prompt: int, tokens: Sequence[range]
    ) -> None:
        """`tokens` group by group. Raises PlanError as `plan_groups`, and where heads and sizes do
        not fit; RegionError where a byte lies in no region."""
        self._specs = target.geometry.specs
        self._tokens = tokens
        totals = tuple(total_heads(spec, source.size) for spec in source.geometry.specs)
        self._by_rank = [
            [
                RankMove(
                    src_rank,
                    dst_rank,
                    plan_groups(
                        source.of_rank(src_rank, totals, heads, num_prompt),
                        target.of_rank(dst_rank, totals, heads, num_prompt),
                        tokens,
                    ),
                )
                for src_rank, heads in _expected(dst_rank, target.size, source.size, totals)
            ]
            for dst_rank in range(target.size)
        ]

    def moves(self, layers: Sequence[range]) -> list[RankMove]:
        """Those of `layers`, group by group; by destination rank, then by source rank. Raises
        PlanError for layers that there are not, and where the moves would not bring every byte."""
        found = []
        for dst_rank, whole in enumerate(self._by_rank):
            mine = [
                RankMove(move.src_rank, move.dst_rank, move.plan.of_layers(layers))
                for move in whole
            ]
            _check_covered(mine, self._specs, self._tokens, layers, dst_rank)
            found += mine
        return [move for move in found if move.plan.boxes] or found[:1]


@lru_cache(maxsize=1024)
def _expected(
    dst_rank: int, dst_size: int, src_size: int, totals: tuple[int, ...]
) -> tuple[tuple[int, tuple[range, ...]], ...]:
    """By source rank, ascending, the heads, group by group, that a destination rank gets from it;
    empty ranges where it gets none of a group."""
    found: dict[int, list[range]] = {}
    for group, total in enumerate(totals):
        for src_rank, heads in sources_of(dst_rank, dst_size, src_size, total):
            nothing = [range(0)] * len(totals)
            found.setdefault(src_rank, nothing)[group] = heads
    return tuple((src_rank, tuple(heads)) for src_rank, heads in sorted(found.items()))


def _check_covered(
    moves: Sequence[RankMove],
    specs: Sequence[KVCacheSpec],
    tokens: Sequence[range],
    layers: Sequence[range],
    dst_rank: int,
) -> None:
    """A destination byte comes twice in no plan, and each head from one source: where the sums are
    equal, every byte comes once."""
    planned = sum(move.plan.total_bytes for move in moves)
    expected = sum(
        len(moved) * len(some) * spec.num_kv_heads * spec.content_dim * spec.itemsize
        for spec, moved, some in zip(specs, tokens, layers, strict=True)
    )
    if planned != expected:
        raise PlanError(f"rank {dst_rank} would get {planned} bytes of {expected}")
