"""Plans of several groups, whose tables are rings of which a stretch moves, against moving every
element by itself."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.cache.footprint import kv_tokens, prompt_chunks, prompt_entries, travelling
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import PlanError, RegionError
from kvxfer.transfer.plan import CacheSide, plan_groups, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.transfer.sides import cache_sides, why_not_blocks

BUDGET = settings(max_examples=examples(15, 60), deadline=None, derandomize=True)
layouts = st.sampled_from(list(KVCacheLayout))
dtypes = st.sampled_from(["float8_e5m2", "bfloat16", "float32"])


@st.composite
def any_spec(draw):
    kind = draw(st.sampled_from(list(GroupKind)))
    return KVCacheSpec(
        draw(st.integers(1, 2)),
        1 if kind is GroupKind.MLA else draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2)),
        draw(dtypes),
        draw(st.integers(1, 4)),
        kind,
        draw(st.integers(1, 9)) if kind is GroupKind.SLIDING else 0,
    )


@dataclasses.dataclass
class Case:
    """A prompt's hand-over between two caches of the same specs."""

    specs: list[KVCacheSpec]
    num_prompt: int
    geometries: list[CacheGeometry]
    tables: list[list[BlockTable]]
    """[side][group], as long as each side's own steps demand."""
    seed: int

    def sides(self, which, regions=None):
        geometry, entries = self.geometries[which], prompt_entries(self.specs, self.num_prompt)
        tables = self.tables[which]
        blocks = [table.ids(kept) for table, kept in zip(tables, entries, strict=True)]
        if regions is None:
            regions = chunks_of(geometry, np.random.default_rng([self.seed, which]))
        return cache_sides(geometry, regions, blocks, self.num_prompt)

    def moves(self, tokens):
        """{destination byte: source byte} of each group's `tokens`, element by element; entries
        are looked up in the whole table."""
        found = {}
        for group, spec in enumerate(self.specs):
            for element in itertools.product(
                tokens[group],
                range(spec.num_layers),
                range(spec.num_kv_heads),
                range(spec.content_dim),
            ):
                to, at = (self.byte_of(which, group, *element) for which in (1, 0))
                found.update((to + byte, at + byte) for byte in range(spec.itemsize))
        return found

    def byte_of(self, which, group, token, layer, head, content):
        geometry = self.geometries[which].groups[group]
        block = self.tables[which][group].at(token // geometry.spec.block_size)
        index = (layer, block, head, token % geometry.spec.block_size, content)
        return geometry.offset + sum(i * s for i, s in zip(index, geometry.strides, strict=True))


def chunks_of(geometry, rng):
    """All of a cache, each group cut anywhere between two granules of its own."""
    regions = []
    for group in geometry.groups:
        between = np.arange(group.offset, group.end, geometry.granularity)[1:]
        cuts = between[rng.random(len(between)) < rng.choice([0, 0.1, 0.5])]
        edges = [group.offset, *cuts.tolist(), group.end]
        regions += [Region(start, end - start) for start, end in itertools.pairwise(edges)]
    return RegionSet().add(regions)


@st.composite
def cases(draw):
    specs = draw(st.lists(any_spec(), min_size=2, max_size=3))
    num_prompt = draw(st.integers(1, 14))
    tokens = kv_tokens(specs, num_prompt, 0)
    geometries, tables = [], []
    for more in (0, draw(st.integers(0, 5))):  # prefill, and decode with room for an answer
        step = draw(st.integers(1, 6))
        held = [spec.blocks_held(n + more, step) for spec, n in zip(specs, tokens, strict=True)]
        capacities = [1 + n + draw(st.integers(0, 3)) for n in held]
        names = [draw(layouts) for _ in specs]
        granularity = draw(st.sampled_from([1, 8, 64]))
        geometries.append(CacheGeometry.build(specs, names, capacities, granularity))
        ids = [draw(st.permutations(range(1, capacity))) for capacity in capacities]
        tables.append([BlockTable(all_ids[:n]) for all_ids, n in zip(ids, held, strict=True)])
    return Case(specs, num_prompt, geometries, tables, draw(st.integers(0, 1 << 16)))


def execute(plan, source, destination):
    for at, to, size in zip(plan.src_offsets, plan.dst_offsets, plan.sizes, strict=True):
        destination[to : to + size] = source[at : at + size]


def memory(case, which):
    rng = np.random.default_rng([case.seed, which, 1])
    return rng.integers(0, 256, case.geometries[which].total_bytes, dtype=np.uint8)


@BUDGET
@given(case=cases(), chunk=st.integers(1, 20))
def test_chunk_by_chunk_every_kept_byte_arrives_once_and_no_other_changes(case, chunk):
    source, destination = memory(case, 0), memory(case, 1)
    entries, lengths = (
        prompt_entries(case.specs, case.num_prompt),
        kv_tokens(case.specs, case.num_prompt, 0),
    )
    kept = [
        range(kept.start * spec.block_size, length)
        for spec, kept, length in zip(case.specs, entries, lengths, strict=True)
    ]
    expected, moved = destination.copy(), case.moves(kept)
    for to, at in moved.items():
        expected[to] = source[at]
    total = 0
    for computed in prompt_chunks(case.specs, case.num_prompt, chunk):
        tokens = travelling(case.specs, case.num_prompt, computed)
        plan = plan_groups(case.sides(0), case.sides(1), tokens)
        execute(plan, source, destination)
        total += plan.total_bytes
    assert np.array_equal(destination, expected)
    assert total == len(moved)


@BUDGET
@given(case=cases(), data=st.data())
def test_runs_of_all_groups_ascend_and_each_lies_in_one_region(case, data):
    tokens = travelling(case.specs, case.num_prompt, range(case.num_prompt))
    tokens = [
        range(*sorted(data.draw(st.tuples(*[st.integers(r.start, r.stop)] * 2)))) for r in tokens
    ]
    src, dst = case.sides(0), case.sides(1)
    plan = plan_groups(src, dst, tokens)
    assert plan.total_bytes == len(case.moves(tokens))
    ends = plan.dst_offsets + plan.sizes
    assert (ends[:-1] <= plan.dst_offsets[1:]).all()
    for side, offsets in ((src[0], plan.src_offsets), (dst[0], plan.dst_offsets)):
        for start, size in zip(offsets, plan.sizes, strict=True):
            assert any(r.offset <= start and start + size <= r.end for r in side.regions.regions)
    by_group = [plan_transfer(*one) for one in zip(src, dst, tokens, strict=True)]
    assert plan.num_runs == sum(part.num_runs for part in by_group), "groups are never joined"


@BUDGET
@given(case=cases(), which=st.integers(0, 1))
def test_a_group_whose_regions_are_gone_is_refused_and_one_that_moves_nothing_is_not(case, which):
    tokens = travelling(case.specs, case.num_prompt, range(case.num_prompt))
    for group in range(len(case.specs)):
        bounds = case.geometries[which].groups[group]
        regions = chunks_of(case.geometries[which], np.random.default_rng(case.seed)).regions
        left = RegionSet(tuple(r for r in regions if not bounds.offset <= r.offset < bounds.end))
        sides = [case.sides(0), case.sides(1)]
        sides[which] = case.sides(which, left)
        if tokens[group]:
            with pytest.raises(RegionError, match=("source", "destination")[which]):
                plan_groups(*sides, tokens)
        others = [range(0) if i == group else t for i, t in enumerate(tokens)]
        assert plan_groups(*sides, others).total_bytes == len(case.moves(others))


# --- one group, a stretch of its table ------------------------------------------------------------

SPEC = KVCacheSpec(2, 2, 4, 4, "bfloat16", 4, GroupKind.SLIDING, 6)


def side(blocks, first_entry, spec=SPEC):
    geometry = CacheGeometry.build([spec], [KVCacheLayout.BLHNC], [9], 1)
    regions = RegionSet().add([Region(0, geometry.total_bytes)])
    return CacheSide(geometry.groups[0], regions, blocks, first_entry)


def test_the_first_named_block_is_that_of_the_first_entry():
    plan = plan_transfer(side([5, 6], 3), side([1, 2], 3), range(12, 20))
    assert (plan.num_runs, plan.total_bytes) == (1, 2 * SPEC.block_bytes)
    assert (plan.src_offsets[0], plan.dst_offsets[0]) == (5 * SPEC.block_bytes, SPEC.block_bytes)


def test_the_two_sides_may_name_different_stretches():
    """Only the tokens must be in both."""
    plan = plan_transfer(side([4, 5, 6], 2), side([1, 2], 3), range(12, 20))
    assert (plan.src_offsets[0], plan.dst_offsets[0]) == (5 * SPEC.block_bytes, SPEC.block_bytes)


@pytest.mark.parametrize("tokens", [range(11, 13), range(4), range(19, 21), range(20, 24)])
def test_tokens_before_or_behind_the_stretch_are_refused(tokens):
    wide = side(list(range(1, 8)), 0)
    for src, dst in ((side([5, 6], 3), wide), (wide, side([5, 6], 3))):
        with pytest.raises(PlanError, match="tokens"):
            plan_transfer(src, dst, tokens)


@pytest.mark.parametrize(("field", "value"), [("kind", GroupKind.FULL), ("window", 7)])
def test_kinds_and_windows_that_differ_are_named(field, value):
    changes = {"kind": value, "window": 0} if field == "kind" else {field: value}
    other = dataclasses.replace(SPEC, **changes)
    with pytest.raises(PlanError, match=f"^{field} differs"):
        plan_transfer(side([5], 3), side([5], 3, other), range(12, 16))


def test_sides_of_different_numbers_of_groups_are_refused():
    one = side([5], 0)
    for src, dst, tokens in (([one], [one, one], 1), ([one, one], [one, one], 1), ([], [one], 1)):
        with pytest.raises(PlanError, match="groups differ"):
            plan_groups(src, dst, [range(4)] * tokens)


# --- what a grant may name ------------------------------------------------------------------------

FULL = KVCacheSpec(1, 1, 4, 4, "bfloat16", 4)
GEOMETRY = CacheGeometry.build([FULL, SPEC], [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC], [9, 6], 64)
"""20 tokens: entries 0 to 4 of the first group, 3 and 4 of the second."""
GOOD = [[1, 2, 3, 4, 8], [5, 1]]


def test_the_blocks_of_a_hand_over_are_those_of_the_kept_entries():
    assert why_not_blocks(GEOMETRY, GOOD, 20) == ""
    sides = cache_sides(GEOMETRY, RegionSet(), GOOD, 20)
    assert [(one.first_entry, list(one.blocks)) for one in sides] == [(0, GOOD[0]), (3, GOOD[1])]
    assert [one.geometry for one in sides] == list(GEOMETRY.groups)


@pytest.mark.parametrize(
    "blocks",
    [[], [GOOD[0]], [*GOOD, []], [GOOD[0], [5]], [GOOD[0], [5, 1, 2]], [[1, 2, 3, 4], [5, 1]]],
)
def test_other_numbers_of_blocks_are_refused(blocks):
    assert "tokens [0, 20)" in why_not_blocks(GEOMETRY, blocks, 20)
    with pytest.raises(PlanError, match="blocks are named"):
        cache_sides(GEOMETRY, RegionSet(), blocks, 20)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([[0, 2, 3, 4, 8], [5, 1]], "null block"),
        ([[1, 2, 3, 4, 9], [5, 1]], "beyond the capacity"),
        ([[1, 2, 3, 4, 8], [6, 1]], "beyond the capacity"),
        ([[1, 2, 3, 4, 8], [-1, 1]], "null block"),
        ([[1, 2, 3, 4, 8], [1, 1]], "twice"),
        ([[1, 2, 3, 4, 1], [5, 1]], "twice"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused(blocks, why):
    assert why in why_not_blocks(GEOMETRY, blocks, 20)
