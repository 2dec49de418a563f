"""What `check_plan` lets through, against sets of bytes: boxes and runs made by hand, and by us."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.planning import bytes_of_boxes

from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ConnectorError, PlanError
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.coverage import crossed_edges, first_overlap
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_transfer
from kvxfer.transfer.reach import check_plan
from kvxfer.transfer.regions import Region, RegionSet

BUDGET = settings(max_examples=examples(25, 100), deadline=None, derandomize=True)
SIZE = 200
ALL = RegionSet((Region(0, SIZE),))


def ints(*values):
    return np.array(values, dtype=np.int64)


@st.composite
def boxes(draw):
    """Any box within SIZE bytes: strides may overlap, vanish, or run backwards."""
    extents = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    run_bytes = draw(st.integers(1, 5))
    columns = []
    for lowest in (-12, 0):
        strides = draw(
            st.one_of(
                st.tuples(*[st.integers(lowest, 24)] * len(extents)),
                st.just(tuple(run_bytes * n for n in nested(extents))),
            )
        )
        sums = [
            sum(i * s for i, s in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, extents))
        ]
        bounds = st.integers(-min(sums), SIZE - run_bytes - max(sums))
        columns.append((strides, bounds))
    count = draw(st.integers(1, 4))
    src, dst = (draw(st.lists(one[1], min_size=count, max_size=count)) for one in columns)
    return Box(ints(*src), ints(*sorted(dst)), extents, columns[0][0], columns[1][0], run_bytes)


def nested(extents):
    """Strides, in runs, of axes without a gap."""
    return [int(np.prod(extents[i + 1 :])) for i in range(len(extents))]


@st.composite
def region_sets(draw, gaps):
    cuts = sorted(draw(st.sets(st.integers(1, SIZE - 1), max_size=6)))
    pairs = list(itertools.pairwise([0, *cuts, SIZE]))
    kept = [pair for pair in pairs if not gaps or draw(st.booleans())]
    return RegionSet(tuple(Region(start, end - start) for start, end in kept))


@BUDGET
@given(made=st.lists(boxes(), min_size=1, max_size=3), regions=region_sets(gaps=False))
def test_edges_are_those_with_moving_bytes_on_either_side(made, regions):
    for side in (0, 1):
        moved = set(bytes_of_boxes(made)[side].tolist())
        expected = [e for e in regions.starts.tolist() if e in moved and e - 1 in moved]
        stretches = [box.dst_stretches() if side else box.src_stretches() for box in made]
        assert crossed_edges(stretches, regions, "here").tolist() == expected


@BUDGET
@given(made=st.lists(boxes(), min_size=1, max_size=3))
def test_an_overlap_is_a_byte_that_comes_twice(made):
    written = bytes_of_boxes(made)[1]
    found = first_overlap([box.dst_stretches() for box in made])
    assert (found is not None) == (len(np.unique(written)) < len(written))


@BUDGET
@given(
    made=st.lists(boxes(), min_size=1, max_size=2),
    src=region_sets(gaps=True),
    dst=region_sets(gaps=True),
    derived=st.booleans(),
)
def test_a_plan_passes_just_if_its_bytes_may_move(made, src, dst, derived):
    came_from, went_to = bytes_of_boxes(made)
    covered = all(
        any(region.offset <= byte < region.end for region in regions.regions)
        for regions, moved in ((src, came_from), (dst, went_to))
        for byte in moved.tolist()
    )
    unique = len(np.unique(went_to)) == len(went_to)
    plan = TransferPlan(tuple(made))
    if covered and unique and derived:
        plan = TransferPlan(tuple(made), src.starts, dst.starts)
    inside = covered and unique and all(
        any(r.offset <= at and at + size <= r.end for r in regions.regions)
        for regions, offsets in ((src, plan.src_offsets), (dst, plan.dst_offsets))
        for at, size in zip(offsets.tolist(), plan.sizes.tolist(), strict=True)
    )  # fmt: skip
    if inside:
        check_plan(plan, Direction.PUSH, src, dst)
        check_plan(plan, Direction.PULL, dst, src)
    else:
        with pytest.raises(ConnectorError):
            check_plan(plan, Direction.PUSH, src, dst)
        assert not derived or not (covered and unique), "a plan that knows the edges is cut there"


@BUDGET
@given(made=st.lists(boxes(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_runs_as_given_are_checked_one_by_one(made, seed):
    plan = TransferPlan(tuple(made))
    src = np.concatenate([box.src_offsets() for box in made])
    dst = np.concatenate([box.dst_offsets() for box in made])
    sizes = np.concatenate([np.full(box.num_runs, box.run_bytes) for box in made])
    order = np.random.default_rng(seed).permutation(len(src))
    given_plan = TransferPlan.of_runs(src[order], dst[order], sizes[order])
    written = bytes_of_boxes(plan.boxes)[1]
    if len(np.unique(written)) == len(written):
        check_plan(given_plan, Direction.PUSH, ALL, ALL)
    else:
        with pytest.raises(ConnectorError, match=r"^overlapping descriptors"):
            check_plan(given_plan, Direction.PUSH, ALL, ALL)


def test_overlapping_descriptors_are_named_by_their_offset():
    plan = TransferPlan.of_runs(ints(0, 20, 40), ints(50, 100, 57), ints(8, 8, 8))
    box = Box(ints(0, 20), ints(50, 57), (), (), (), 8)
    for made in (plan, TransferPlan((box,))):
        with pytest.raises(ConnectorError, match=r"^overlapping descriptors: .* 57 comes twice"):
            check_plan(made, Direction.PUSH, ALL, ALL)
    twice = Box(ints(0), ints(40), (2,), (8,), (0,), 8)
    with pytest.raises(ConnectorError, match=r"^overlapping descriptors: .* 40 comes twice"):
        check_plan(TransferPlan((twice,)), Direction.PUSH, ALL, ALL)
    adjoining = Box(ints(0, 0), ints(50, 58), (), (), (), 8)
    check_plan(TransferPlan((adjoining,)), Direction.PUSH, ALL, ALL)


def test_boxes_that_meet_only_between_their_runs_do_not_overlap():
    """Even and odd pages: their spans overlap, their bytes do not."""
    even = Box(ints(0, 16), ints(0, 100), (3,), (4,), (8,), 4)
    odd = Box(ints(0, 16), ints(4, 104), (3,), (4,), (8,), 4)
    check_plan(TransferPlan((even, odd)), Direction.PUSH, ALL, ALL)
    with pytest.raises(ConnectorError, match="overlapping descriptors"):
        check_plan(TransferPlan((even, odd, odd)), Direction.PUSH, ALL, ALL)
    wide = Box(ints(0), ints(0), (2,), (8,), (40,), 8)  # [0, 8) and [40, 48)
    for second, fine in ((30, True), (42, False)):
        small = Box(ints(0, 16), ints(10, second), (), (), (), 4)
        if fine:
            check_plan(TransferPlan((wide, small)), Direction.PUSH, ALL, ALL)
        else:
            with pytest.raises(ConnectorError, match=f"offset {second} comes twice"):
                check_plan(TransferPlan((wide, small)), Direction.PUSH, ALL, ALL)


@pytest.mark.parametrize("run_bytes", [0, -4])
def test_a_box_of_no_bytes_is_refused(run_bytes):
    plan = TransferPlan((Box(ints(0), ints(8), (2,), (8,), (8,), run_bytes),))
    with pytest.raises(ConnectorError, match=f"run of {run_bytes} bytes"):
        check_plan(plan, Direction.PUSH, ALL, ALL)


@pytest.mark.parametrize(
    "start", [-1, SIZE - 15, SIZE, 2**62, 2**63 - 16], ids=["below", "end", "beyond", "far", "wrap"]
)
def test_a_box_that_leaves_the_regions_is_refused(start):
    box = Box(ints(start), ints(0), (2,), (8,), (8,), 8)
    with pytest.raises(ConnectorError, match=r"^source: .* lie in no registered region"):
        check_plan(TransferPlan((box,)), Direction.PUSH, ALL, ALL)
    box = Box(ints(0), ints(start), (2,), (8,), (8,), 8)
    with pytest.raises(ConnectorError, match=r"^destination: .* lie in no registered region"):
        check_plan(TransferPlan((box,)), Direction.PULL, ALL, ALL)


def test_a_run_across_an_edge_that_the_plan_does_not_know_is_refused():
    two = RegionSet((Region(0, 96), Region(96, 104)))
    box = Box(ints(0), ints(80), (2,), (8,), (8,), 8)  # [80, 96) and no more
    check_plan(TransferPlan((box,)), Direction.PUSH, two, two)
    joined = Box(ints(0), ints(80), (3,), (8,), (8,), 8)  # one run of 24, after joining
    with pytest.raises(ConnectorError, match=r"^destination: bytes .80, .24."):
        check_plan(TransferPlan((joined,)), Direction.PUSH, two, two)
    check_plan(TransferPlan((joined,), dst_edges=ints(96)), Direction.PUSH, two, two)
    apart = Box(ints(0), ints(80), (3,), (16,), (8,), 8)  # three runs, none of them across
    check_plan(TransferPlan((apart,)), Direction.PUSH, two, two)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ((ints(0), ints(0, 8), (), (), ()), "dst_starts"),
        ((ints(0), ints(8).astype(np.int32), (), (), ()), "int32"),
        ((ints(0), ints(8), (2,), (), (4,)), "strides"),
        ((ints(0), ints(8), (2,), (4,), ()), "strides"),
        ((ints(0), ints(8), (0,), (4,), (4,)), "extents"),
    ],
)
def test_columns_of_a_box_that_do_not_fit_are_refused(columns, why):
    with pytest.raises(PlanError, match=f"^box: .*{why}"):
        Box(*columns, 4)


def test_a_planners_word_counts_while_the_regions_that_it_saw_are_there() -> None:
    spec = KVCacheSpec(2, 1, 8, 8, "float32", 4)
    geometry = GroupGeometry.build(spec, KVCacheLayout.LBNHC, 64, 4096)
    first, second = (Region(geometry.segment_offset(i), 4096) for i in range(2))
    regions = RegionSet().add([first, second])
    side = CacheSide(geometry, regions, [1, 2])
    plan = plan_transfer(side, CacheSide(geometry, regions, [5, 3]), range(8))
    grown = regions.add([Region(second.end, 4096)])
    for known in (regions, grown, RegionSet((first, second))):
        check_plan(plan, Direction.PULL, known, regions)
    for gone in (first, second):
        revoked = grown.remove([gone])
        for sides in ((revoked, regions), (regions, revoked)):
            with pytest.raises(ConnectorError, match="registered region"):
                check_plan(plan, Direction.PUSH, *sides)
    halves = RegionSet().add(
        [Region(first.offset, 2048), Region(first.offset + 2048, 2048), second]
    )
    check_plan(plan, Direction.PUSH, halves, regions)  # found out the long way


@given(st.lists(st.integers(0, 40), unique=True, max_size=12), st.data())
@BUDGET
def test_a_set_of_regions_includes_its_parts_and_no_others(starts: list[int], data) -> None:
    def regions(of: list[int], size: int = 64) -> RegionSet:
        return RegionSet(tuple(Region(64 * start, size) for start in sorted(of)))

    whole = regions(starts)
    part = data.draw(st.lists(st.sampled_from(starts), unique=True) if starts else st.just([]))
    assert whole.includes(regions(part))
    assert whole.includes(regions(part, 32)) == (not part)
    other = data.draw(st.integers(0, 40))
    assert whole.includes(regions([*{*part, other}])) == (other in starts)
