"""Plans, against moving every element by itself."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import PlanError, RegionError
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

BUDGET = settings(max_examples=examples(5, 15), deadline=None, derandomize=True)

every_pair = pytest.mark.parametrize(
    ("src_layout", "dst_layout"), list(itertools.product(KVCacheLayout, repeat=2))
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What to move, in terms that do not depend on the layouts."""

    spec: KVCacheSpec
    capacities: tuple[int, int]
    granularities: tuple[int, int]
    tables: tuple[list[int], list[int]]
    tokens: range
    layers: range
    seed: int

    def side(self, which, layout):
        """Side 0 (source) or 1, with as many blocks committed as needed or more, in chunks."""
        geometry = GroupGeometry.build(
            self.spec, layout, self.capacities[which], self.granularities[which]
        )
        rng = np.random.default_rng([self.seed, which])
        last = max(self.tables[which], default=0)
        committed = int(rng.integers(last, geometry.capacity_blocks)) + 1
        regions = random_chunks(geometry, committed, rng)
        return CacheSide(geometry, RegionSet().add(regions), self.tables[which])


def random_chunks(geometry, num_blocks, rng):
    """The committed prefix of each segment, cut anywhere between two granules."""
    size = geometry.committed_bytes_per_segment(num_blocks)
    between = np.arange(geometry.granularity, size, geometry.granularity)
    for segment in range(geometry.num_segments):
        cuts = between[rng.random(len(between)) < rng.choice([0, 0.1, 0.5])]
        edges = geometry.segment_offset(segment) + np.array([0, *cuts, size])
        for start, end in itertools.pairwise(edges.tolist()):
            yield Region(start, end - start)


@st.composite
def cases(draw):
    spec = KVCacheSpec(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim_k=draw(st.integers(1, 3)),
        head_dim_v=draw(st.integers(0, 2)),
        dtype=draw(st.sampled_from(["float8_e5m2", "bfloat16", "float32"])),
        block_size=draw(st.integers(1, 4)),
    )
    capacities = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    entries = draw(st.integers(0, capacities[1]))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, entries * spec.block_size)] * 2)))
    first, last = sorted(draw(st.tuples(*[st.integers(0, spec.num_layers)] * 2)))
    src_ids = st.lists(st.integers(0, capacities[0] - 1), min_size=entries, max_size=entries)
    src_table = draw(st.one_of(ascending(entries, capacities[0]), src_ids))
    dst_ids = st.permutations(range(capacities[1])).map(lambda ids: ids[:entries])
    dst_table = draw(st.one_of(ascending(entries, capacities[1]), dst_ids))
    return Case(
        spec,
        capacities,
        draw(st.tuples(*[st.sampled_from([1, 2, 8, 32, 64])] * 2)),
        (src_table, dst_table),
        range(start, stop),
        range(first, last),
        draw(st.integers(0, 1 << 16)),
    )


def ascending(entries, capacity):
    """Consecutive ids where they fit, which is where runs coalesce over blocks."""
    firsts = st.integers(0, max(0, capacity - entries))
    return firsts.map(lambda first: [(first + i) % capacity for i in range(entries)])


def moves(case, src, dst):
    """{destination byte: source byte}, element by element."""
    spec = case.spec
    found = {}
    for token, layer, head, content in itertools.product(
        case.tokens, case.layers, range(spec.num_kv_heads), range(spec.content_dim)
    ):
        entry, slot = token // spec.block_size, token % spec.block_size
        at = []
        for side in (dst, src):
            index = (layer, side.blocks[entry], head, slot, content)
            at.append(sum(i * s for i, s in zip(index, side.geometry.strides, strict=True)))
        found.update((at[0] + byte, at[1] + byte) for byte in range(spec.itemsize))
    return found


def fewest_runs(expected, src, dst):
    """Runs that nobody can do without: one for each byte that does not continue the one before."""
    src_edges = {region.offset for region in src.regions.regions}
    dst_edges = {region.offset for region in dst.regions.regions}
    return sum(
        expected.get(to - 1) != at - 1 or to in dst_edges or at in src_edges
        for to, at in expected.items()
    )


def execute(plan, source, destination):
    for at, to, size in zip(plan.src_offsets, plan.dst_offsets, plan.sizes, strict=True):
        destination[to : to + size] = source[at : at + size]


def lies_in_one_region(regions, offset, size):
    return any(r.offset <= offset and offset + size <= r.end for r in regions.regions)


@every_pair
@BUDGET
@given(case=cases())
def test_every_byte_arrives_and_no_other_changes(src_layout, dst_layout, case):
    src, dst = case.side(0, src_layout), case.side(1, dst_layout)
    rng = np.random.default_rng(case.seed)
    source = rng.integers(0, 256, src.geometry.total_bytes, dtype=np.uint8)
    destination = rng.integers(0, 256, dst.geometry.total_bytes, dtype=np.uint8)
    expected = destination.copy()
    moved = moves(case, src, dst)
    for to, at in moved.items():
        expected[to] = source[at]

    plan = plan_transfer(src, dst, case.tokens, case.layers)
    execute(plan, source, destination)

    assert np.array_equal(destination, expected)
    assert plan.total_bytes == len(moved)


@every_pair
@BUDGET
@given(case=cases())
def test_runs_are_few_ordered_and_within_a_region_each(src_layout, dst_layout, case):
    src, dst = case.side(0, src_layout), case.side(1, dst_layout)
    plan = plan_transfer(src, dst, case.tokens, case.layers)
    assert plan.num_runs == fewest_runs(moves(case, src, dst), src, dst)
    ends = plan.dst_offsets + plan.sizes
    assert (plan.sizes > 0).all()
    assert (ends[:-1] <= plan.dst_offsets[1:]).all()
    for at, to, size in zip(plan.src_offsets, plan.dst_offsets, plan.sizes, strict=True):
        assert lies_in_one_region(src.regions, at, size)
        assert lies_in_one_region(dst.regions, to, size)
    for array in (plan.src_offsets, plan.dst_offsets, plan.sizes):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


@every_pair
@BUDGET
@given(case=cases(), which=st.integers(0, 1), lost=st.floats(0, 1))
def test_coverage_is_of_the_bytes_that_move_and_no_others(
    src_layout, dst_layout, case, which, lost
):
    sides = [case.side(0, src_layout), case.side(1, dst_layout)]
    moved = moves(case, *sides)
    touched = set(moved.values()) if which == 0 else set(moved)
    regions = sides[which].regions.regions
    needed = [r for r in regions if touched & set(range(r.offset, r.end))]
    sides[which] = dataclasses.replace(sides[which], regions=RegionSet(tuple(needed)))
    assert plan_transfer(*sides, case.tokens, case.layers).total_bytes == len(moved)
    if needed:
        needed.pop(int(lost * (len(needed) - 1)))
        sides[which] = dataclasses.replace(sides[which], regions=RegionSet(tuple(needed)))
        with pytest.raises(RegionError, match=("source", "destination")[which]):
            plan_transfer(*sides, case.tokens, case.layers)


SPEC = KVCacheSpec(2, 2, 4, 4, "bfloat16", 4)


def whole_side(layout, blocks, spec=SPEC, capacity=8):
    """All blocks committed, one region a segment, no padding between segments."""
    geometry = GroupGeometry.build(spec, layout, capacity, 1)
    size = geometry.segment_stride_bytes
    regions = [Region(geometry.segment_offset(i), size) for i in range(geometry.num_segments)]
    return CacheSide(geometry, RegionSet().add(regions), blocks)


@pytest.mark.parametrize("layout", [name for name in KVCacheLayout if name.is_block_outermost])
def test_consecutive_blocks_of_one_block_outermost_layout_are_one_run(layout):
    src, dst = whole_side(layout, [1, 2, 3]), whole_side(layout, [4, 5, 6])
    plan = plan_transfer(src, dst, range(12))
    assert (plan.num_runs, plan.total_bytes) == (1, 3 * SPEC.block_bytes)
    assert (plan.src_offsets[0], plan.dst_offsets[0]) == (SPEC.block_bytes, 4 * SPEC.block_bytes)


def test_consecutive_blocks_of_layer_outermost_layouts_are_one_run_a_layer():
    src, dst = (
        whole_side(KVCacheLayout.LBHNC, [1, 2, 3]),
        whole_side(KVCacheLayout.LBHNC, [5, 6, 7]),
    )
    assert plan_transfer(src, dst, range(12)).num_runs == SPEC.num_layers
    assert plan_transfer(src, dst, range(12), range(1, 2)).num_runs == 1


def test_blocks_that_descend_together_coalesce_too():
    src, dst = (
        whole_side(KVCacheLayout.BLHNC, [3, 2, 1]),
        whole_side(KVCacheLayout.BLHNC, [6, 5, 4]),
    )
    assert plan_transfer(src, dst, range(12)).num_runs == 1


def test_all_layers_are_the_default():
    src, dst = whole_side(KVCacheLayout.BHLNC, [1]), whole_side(KVCacheLayout.LBNHC, [1])
    assert plan_transfer(src, dst, range(4)).total_bytes == SPEC.block_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("head_dim_k", 5),
        ("head_dim_v", 3),
        ("dtype", "float16"),
    ],
)
def test_specs_that_differ_are_named(field, value):
    other = dataclasses.replace(SPEC, **{field: value})
    src = whole_side(KVCacheLayout.LBHNC, [1, 2])
    dst = whole_side(KVCacheLayout.LBHNC, [1, 2], spec=other)
    for tokens in (range(4), range(0)):
        with pytest.raises(PlanError, match=f"^{field} differs"):
            plan_transfer(src, dst, tokens)


@pytest.mark.parametrize(
    "tokens", [range(9), range(8, 9), range(-1, 2), range(0, 4, 2), range(3, -1)]
)
def test_tokens_outside_a_block_table_are_refused(tokens):
    long = whole_side(KVCacheLayout.LBHNC, [1, 2, 3])
    short = whole_side(KVCacheLayout.LBHNC, [1, 2])
    for src, dst in ((long, short), (short, long)):
        with pytest.raises(PlanError, match="tokens"):
            plan_transfer(src, dst, tokens)


@pytest.mark.parametrize("layers", [range(3), range(-1, 1), range(0, 2, 2), range(1, -1, -1)])
def test_layers_that_are_not_there_are_refused(layers):
    src, dst = whole_side(KVCacheLayout.LBHNC, [1]), whole_side(KVCacheLayout.LBHNC, [1])
    with pytest.raises(PlanError, match="layers"):
        plan_transfer(src, dst, range(4), layers)


@pytest.mark.parametrize(
    ("tokens", "layers"), [(range(0), None), (range(99, 99), None), (range(4), range(1, 1))]
)
def test_nothing_to_move_is_an_empty_plan(tokens, layers):
    src, dst = whole_side(KVCacheLayout.LBHNC, [1]), whole_side(KVCacheLayout.BLNHC, [1])
    plan = plan_transfer(src, dst, tokens, layers)
    assert (plan.num_runs, plan.total_bytes) == (0, 0)
    assert plan.src_offsets.dtype == plan.dst_offsets.dtype == plan.sizes.dtype == np.int64


def test_a_destination_block_is_written_once():
    src, dst = (
        whole_side(KVCacheLayout.LBHNC, [1, 1, 1]),
        whole_side(KVCacheLayout.LBHNC, [2, 5, 5]),
    )
    with pytest.raises(PlanError, match="destination block 5"):
        plan_transfer(src, dst, range(4, 12))
    assert plan_transfer(src, dst, range(8)).total_bytes == 2 * SPEC.block_bytes


@pytest.mark.parametrize("block", [-1, 8])
@pytest.mark.parametrize("which", ["source", "destination"])
def test_a_block_beyond_the_capacity_is_not_a_block_of_the_next_segment(which, block):
    good, bad = whole_side(KVCacheLayout.LBHNC, [1]), whole_side(KVCacheLayout.LBHNC, [block])
    src, dst = (bad, good) if which == "source" else (good, bad)
    with pytest.raises(PlanError, match=f"{which} block {block}"):
        plan_transfer(src, dst, range(4))


def test_columns_of_runs_must_be_alike() -> None:
    offsets = np.array([0, 4096], dtype=np.int64)
    with pytest.raises(PlanError, match="columns"):
        TransferPlan.of_runs(offsets, offsets, offsets[:1])
    with pytest.raises(PlanError, match="int64"):
        TransferPlan.of_runs(offsets, offsets, offsets.astype(np.int32))
