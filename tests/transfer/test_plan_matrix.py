"""Every pair of layouts, block-size ratio and pair of tensor-parallel sizes, byte for byte: direct,
and staged."""

import itertools

import numpy as np
import pytest
from support.planning import bytes_of, bytes_of_boxes, bytes_of_runs, check_form, chunked

from connectors.staging_plan import gather, pieces_of, scatter
from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.reach import check_plan
from kvxfer.transfer.shards import head_range, sources_of

LAYERS, HEADS = 2, 4
BLOCK_SIZES = {0.25: (2, 8), 0.5: (2, 4), 1: (4, 4), 2: (4, 2), 4: (8, 2)}
PARALLEL = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 8)]
TOKENS = [range(16), range(3, 21), range(8, 19), range(5, 16), range(9, 10), range(1, 24)]
"""Whole blocks; a tail and a head; a head; a tail; within a block; both of both sizes."""
LENGTH = 24

every_pair = pytest.mark.parametrize(
    ("src_layout", "dst_layout"), list(itertools.product(KVCacheLayout, repeat=2))
)


class Shard:
    """One rank: its heads of everything, in blocks at random places, in chunks."""

    def __init__(self, rank, size, layout, block_size, rng):
        self.heads = head_range(rank, size, HEADS)
        spec = KVCacheSpec(LAYERS, len(self.heads), 2, 1, "bfloat16", block_size)
        entries = LENGTH // block_size
        capacity = entries + 3
        geometry = GroupGeometry.build(spec, layout, capacity, 16)
        start = int(rng.integers(0, 4))  # half of the time neighbours, which coalesce
        blocks = rng.permutation(capacity)[:entries]
        if rng.random() < 0.5:
            blocks = np.arange(start, start + entries)
        self.table = dict(enumerate(blocks.tolist()))
        regions = chunked(geometry, rng, rng.choice([0, 0.05, 0.3]))
        self.side = CacheSide(geometry, regions, blocks.tolist(), 0, self.heads.start)

    def places(self, tokens):
        return bytes_of(
            self.side.geometry, self.table, tokens, range(len(self.heads)), range(LAYERS)
        )

    def names(self, tokens):
        """What the bytes at `places` mean: [layers, heads, tokens, content bytes]."""
        content = self.side.geometry.spec.content_dim * self.side.geometry.spec.itemsize
        every = np.arange(1, LAYERS * HEADS * LENGTH * content + 1)
        every = every.reshape(LAYERS, HEADS, LENGTH, content)
        return every[:, self.heads.start : self.heads.stop, tokens.start : tokens.stop]


def check_rank(rank, sizes, sources, target, tokens):
    """All that a destination rank gets is what it should get, and it gets it once."""
    memory = np.zeros(target.side.geometry.total_bytes, dtype=np.int64)
    expected = memory.copy()
    expected[target.places(tokens)] = target.names(tokens)
    moved = 0
    for src_rank, heads in sources_of(rank, sizes[1], sizes[0], HEADS):
        source = sources[src_rank]
        whole = range(LENGTH)
        held = np.full(source.side.geometry.total_bytes, -1)
        held[source.places(whole)] = source.names(whole)
        side = CacheSide(
            source.side.geometry, source.side.regions, source.side.blocks, 0,
            source.heads.start, heads,
        )  # fmt: skip
        plan = plan_transfer(side, target.side, tokens)
        assert len(plan.boxes) <= 5
        if rank == sizes[1] // 2:  # one rank's will do: the others' are of the same shapes
            check_form(plan, side.regions, target.side.regions)
            check_plan(plan, Direction.PUSH, side.regions, target.side.regions)
            staged = memory.copy()
        came_from, went_to = bytes_of_runs(plan.runs)
        memory[went_to] = held[came_from]
        if rank == sizes[1] // 2:
            stage(plan, held, staged)
            assert np.array_equal(staged, memory)
        moved += plan.total_bytes
    assert np.array_equal(memory, expected)
    assert moved == np.count_nonzero(expected)


def stage(plan, source, target):
    """Do `plan` by way of slots, into which about a third of it goes."""
    slot_bytes = -(-plan.total_bytes // 3)
    for piece in pieces_of(plan.boxes, slot_bytes):
        slot = np.zeros(slot_bytes, dtype=np.int64)
        for boxes, origin, end in (
            (gather(piece.sources()), source, slot),
            (scatter(piece.destinations()), slot, target),
        ):
            came_from, went_to = bytes_of_boxes(boxes)
            end[went_to] = origin[came_from]


@every_pair
def test_every_byte_of_every_rank_arrives_from_one_source(src_layout, dst_layout):
    cases = itertools.product(BLOCK_SIZES.values(), PARALLEL)
    for index, (block_sizes, sizes) in enumerate(cases):
        rng = np.random.default_rng([index, *map(ord, src_layout + dst_layout)])
        tokens = TOKENS[int(rng.integers(len(TOKENS)))]
        sources, targets = (
            [Shard(rank, size, layout, block_size, rng) for rank in range(size)]
            for size, layout, block_size in zip(
                sizes, (src_layout, dst_layout), block_sizes, strict=True
            )
        )
        for rank, target in enumerate(targets):
            check_rank(rank, sizes, sources, target, tokens)
