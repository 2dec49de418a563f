"""Hand-overs between ends whose block sizes or shards differ: what travels, and real bytes moved
by a connector across the edge of every chunk."""

import dataclasses
import itertools
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import bytes_of, bytes_of_runs, chunked

from connectors.loopback import LoopbackConnector
from kvxfer.cache.footprint import kv_tokens, prompt_chunks, prompt_entries, travelling
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import PlanError
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import CacheSide, plan_groups, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.transfer.shards import head_range, sources_of
from kvxfer.transfer.sides import cache_sides, why_not_blocks

BUDGET = settings(max_examples=80, deadline=None, derandomize=True)
layouts = st.sampled_from(list(KVCacheLayout))


@st.composite
def two_ends(draw):
    """The specs of both ends, which differ in block sizes, each group on its own."""
    kinds = [GroupKind.FULL, GroupKind.SLIDING]
    if draw(st.booleans()):
        kinds = [GroupKind.CROSS, GroupKind.FULL]
    ours, theirs = [], []
    for kind in kinds:
        window = draw(st.integers(1, 12)) if kind is GroupKind.SLIDING else 0
        small = draw(st.integers(1, 4))
        sizes = draw(st.permutations([small, small * draw(st.integers(1, 4))]))
        for specs, size in zip((ours, theirs), sizes, strict=True):
            specs.append(KVCacheSpec(2, 2, 1, 1, "float16", size, kind, window))
    return ours, theirs


class End:
    """A cache with a prompt's blocks named, whole and in one region a group."""

    def __init__(self, specs, num_prompt, draw, num_cached=0):
        entries = prompt_entries(specs, num_prompt, num_cached)
        capacities = [len(kept) + 2 for kept in entries]
        self.geometry = CacheGeometry.build(specs, [draw(layouts) for _ in specs], capacities, 8)
        self.blocks = [
            draw(st.permutations(range(1, capacity)))[: len(kept)]
            for capacity, kept in zip(capacities, entries, strict=True)
        ]
        self.tables = [
            dict(zip(kept, ids, strict=True))
            for kept, ids in zip(entries, self.blocks, strict=True)
        ]
        bounds = [Region(group.offset, group.total_bytes) for group in self.geometry.groups]
        regions = RegionSet(tuple(bounds))
        named = self.geometry, regions, self.blocks, num_prompt
        self.sides = cache_sides(*named, num_cached=num_cached)
        assert why_not_blocks(self.geometry, self.blocks, num_prompt, num_cached) == ""

    def places(self, group, tokens):
        return bytes_of(
            self.geometry.groups[group], self.tables[group], tokens, range(2), range(2)
        ).ravel()


@BUDGET
@given(specs=two_ends(), num_prompt=st.integers(1, 30), chunk=st.integers(1, 30), data=st.data())
def test_what_a_later_token_sees_arrives_once_from_what_both_ends_hold(
    specs, num_prompt, chunk, data
):
    source, target = (End(one, num_prompt, data.draw) for one in specs)
    moved = []
    for computed in prompt_chunks(specs[0], num_prompt, chunk):
        tokens = travelling(specs[0], num_prompt, computed, specs[1])
        assert tokens == travelling(specs[1], num_prompt, computed, specs[0]), "both ends agree"
        moved.append(bytes_of_runs(plan_groups(source.sides, target.sides, tokens).runs))
    came_from, went_to = (np.concatenate(columns) for columns in zip(*moved, strict=True))
    assert len(np.unique(went_to)) == len(went_to)
    origins = dict(zip(went_to.tolist(), came_from.tolist(), strict=True))
    lengths = kv_tokens(specs[0], num_prompt, 0)
    for group, (spec, length) in enumerate(zip(specs[0], lengths, strict=True)):
        seen = range(min(spec.first_seen(length), length), length)
        to, at = target.places(group, seen), source.places(group, seen)
        assert [origins[byte] for byte in to.tolist()] == at.tolist()


@settings(BUDGET, max_examples=40)
@given(
    sizes=st.sampled_from([(4, 4), (4, 16), (16, 4), (2, 6)]),
    num_prompt=st.integers(1, 60),
    chunk=st.integers(1, 60),
    data=st.data(),
)
def test_behind_what_is_there_every_byte_arrives_once_and_no_other(sizes, num_prompt, chunk, data):
    """What is there are whole blocks of the target's, which may end inside one of the source's."""
    specs = [
        [
            KVCacheSpec(2, 2, 1, 1, "float16", size),
            KVCacheSpec(2, 1, 2, 0, "float16", size, GroupKind.MLA),
        ]
        for size in sizes
    ]
    num_cached = sizes[1] * data.draw(st.integers(0, (num_prompt - 1) // sizes[1]))
    source, target = (End(one, num_prompt, data.draw, num_cached) for one in specs)
    moved = [[], []]
    for computed in prompt_chunks(specs[0], num_prompt, chunk):
        left = range(max(computed.start, num_cached), computed.stop)
        if left:
            tokens = travelling(specs[0], num_prompt, left, specs[1])
            runs = bytes_of_runs(plan_groups(source.sides, target.sides, tokens).runs)
            for column, found in zip(moved, runs, strict=True):
                column += found.tolist()
    origins = dict(zip(moved[1], moved[0], strict=True))
    assert len(origins) == len(moved[1])
    expected = {}
    for group in range(2):
        kept = range(num_cached, num_prompt)
        heads = range(specs[0][group].num_kv_heads)
        ends = [
            bytes_of(end.geometry.groups[group], end.tables[group], kept, heads, range(2)).ravel()
            for end in (target, source)
        ]
        expected |= dict(zip(*(one.tolist() for one in ends), strict=True))
    assert origins == expected


def test_the_later_of_two_starts_is_where_a_window_begins_to_travel():
    """25 tokens, a window of 6: token 20 on is seen, entry 5 of 4 and entry 1 of 16 tokens."""
    small = KVCacheSpec(1, 1, 4, 4, "bfloat16", 4, GroupKind.SLIDING, 6)
    large = dataclasses.replace(small, block_size=16)
    for ours, theirs in ((small, large), (large, small)):
        assert travelling([ours], 25, range(25), [theirs]) == [range(20, 25)]
        assert list(travelling([ours], 25, range(20), [theirs])[0]) == []
    assert travelling([large], 25, range(25)) == [range(16, 25)]


def test_blocks_are_counted_in_each_ends_own_sizes():
    for size, expected in ((4, 5), (16, 2)):
        spec = KVCacheSpec(1, 1, 4, 4, "bfloat16", size)
        geometry = CacheGeometry.build([spec], [KVCacheLayout.LBHNC], [9], 64)
        blocks = [list(range(1, expected + 1))]
        assert why_not_blocks(geometry, blocks, 20) == ""
        assert why_not_blocks(geometry, [blocks[0][1:]], 20)


# --- shards ---------------------------------------------------------------------------------------

SPECS = [
    KVCacheSpec(1, 2, 4, 4, "bfloat16", 4),
    KVCacheSpec(1, 1, 4, 0, "bfloat16", 4, GroupKind.MLA),
]


def shard(held=None, moved=None):
    geometry = CacheGeometry.build(SPECS, [KVCacheLayout.LBHNC] * 2, [4, 4], 1)
    regions = RegionSet((Region(0, geometry.total_bytes),))
    return cache_sides(geometry, regions, [[1], [1]], 4, held, moved)


def test_a_shard_says_which_heads_of_the_model_it_has():
    sides = shard([range(2, 4), range(1)], [range(3, 4), range(1)])
    assert [(one.first_head, one.heads) for one in sides] == [(2, range(3, 4)), (0, range(1))]
    assert [(one.first_head, one.heads) for one in shard()] == [(0, None), (0, None)]


def test_other_numbers_of_heads_are_refused():
    for held in ([range(2, 4)], [range(2, 3), range(1)], [range(2), range(2)]):
        with pytest.raises(PlanError, match=r"^heads: "):
            shard(held)
    with pytest.raises(PlanError, match=r"^heads: "):
        shard(None, [range(1)])


def test_a_latent_vector_comes_from_one_of_its_holders():
    """TP 2 to 1: each of the two has half of the heads, and one of them sends the latents."""
    total = 0
    for rank in range(2):
        moved = [dict(sources_of(0, 1, 2, heads)).get(rank, range(0)) for heads in (4, 1)]
        held = [head_range(rank, 2, heads) for heads in (4, 1)]
        whole = [dataclasses.replace(SPECS[0], num_kv_heads=4), SPECS[1]]
        geometry = CacheGeometry.build(whole, [KVCacheLayout.LBNHC] * 2, [4, 4], 1)
        target = cache_sides(geometry, RegionSet((Region(0, geometry.total_bytes),)), [[1], [1]], 4)
        total += plan_groups(shard(held, moved), target, [range(4)] * 2).total_bytes
    assert total == geometry.bytes_of([1, 1])


# --- real bytes -----------------------------------------------------------------------------------


def window(geometry, regions, name, seed):
    memory = np.random.default_rng(seed).integers(0, 256, geometry.total_bytes, dtype=np.uint8)
    connector = LoopbackConnector(name, MemoryWindow(memory.ctypes.data, memory.nbytes, "cpu"))
    connector.register(list(regions.regions))
    return memory, connector


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("src_layout", "dst_layout"), list(itertools.product(KVCacheLayout, repeat=2))
)
def test_data_across_the_edge_of_every_chunk(src_layout, dst_layout, direction):
    """A chunk a granule, and a granule shorter than a page: all edges lie within what moves."""
    rng = np.random.default_rng(7)
    spec = KVCacheSpec(2, 2, 3, 2, "bfloat16", 8)
    specs = spec, dataclasses.replace(spec, block_size=4, num_kv_heads=4)
    geometries = [
        GroupGeometry.build(one, layout, 24 // one.block_size, 32)
        for one, layout in zip(specs, (src_layout, dst_layout), strict=True)
    ]
    regions = [chunked(geometry, rng, 1.0) for geometry in geometries]
    tables = [rng.permutation(geometry.capacity_blocks).tolist() for geometry in geometries]
    sides = [
        CacheSide(geometry, region, table, 0, first)
        for geometry, region, table, first in zip(geometries, regions, tables, (2, 0), strict=True)
    ]
    plan = plan_transfer(*sides, range(24))
    assert len(plan.src_edges) and len(plan.dst_edges)
    source, left = window(geometries[0], regions[0], "left", 1)
    destination, right = window(geometries[1], regions[1], "right", 2)
    expected = destination.copy()
    heads = range(2), range(2, 4)
    to, at = (
        bytes_of(geometry, dict(enumerate(table)), range(24), own, range(2))
        for geometry, table, own in zip(
            reversed(geometries), reversed(tables), reversed(heads), strict=True
        )
    )
    expected[to] = source[at]
    with closing(left), closing(right):
        push = direction is Direction.PUSH
        mover, other, name = (left, right, "right") if push else (right, left, "left")
        far, chunks = (destination, regions[1]) if push else (source, regions[0])
        mover.connect(name, far.ctypes.data, other.describe(chunks.regions))
        ticket = mover.submit(name, direction, plan)
        assert mover.poll() == [TicketResult(ticket)]
    assert np.array_equal(destination, expected)
