"""Sets of registered ranges, against sets of bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.errors import RegionError
from kvxfer.transfer.regions import Region, RegionSet

BUDGET = settings(max_examples=examples(40, 150), deadline=None, derandomize=True)

regions = st.builds(Region, offset=st.integers(0, 40), size=st.integers(1, 8))
spans = st.tuples(st.integers(0, 48), st.integers(1, 10))


def bytes_of(region):
    return set(range(region.offset, region.offset + region.size))


def disjoint(candidates):
    """Those of `candidates` that share no byte with one before."""
    kept, taken = [], set()
    for region in candidates:
        if not bytes_of(region) & taken:
            kept.append(region)
            taken |= bytes_of(region)
    return kept


@BUDGET
@given(first=st.lists(regions, max_size=4), second=st.lists(regions, max_size=4))
def test_adding_keeps_all_and_refuses_an_overlap(first, second):
    before = RegionSet().add(disjoint(first))
    everything = [*before.regions, *second]
    if len(disjoint(everything)) < len(everything):
        with pytest.raises(RegionError, match="overlap"):
            before.add(second)
    else:
        after = before.add(second)
        assert after.generation == before.generation + 1 == 2
        assert list(after.regions) == sorted(everything, key=lambda region: region.offset)
        assert after.total_bytes == len(set().union(*map(bytes_of, everything)))
    assert set(before.regions) == set(disjoint(first))


@BUDGET
@given(candidates=st.lists(regions, max_size=6), wanted=st.lists(spans, max_size=5))
def test_a_span_is_covered_by_one_region_or_refused(candidates, wanted):
    there = RegionSet().add(disjoint(candidates))
    offsets = np.array([offset for offset, _ in wanted], dtype=np.int64)
    sizes = np.array([size for _, size in wanted], dtype=np.int64)
    wrong = [
        (offset, size)
        for offset, size in wanted
        if not any(set(range(offset, offset + size)) <= bytes_of(r) for r in there.regions)
    ]
    if wrong:
        offset, size = wrong[0]
        with pytest.raises(RegionError) as caught:
            there.check_covers(offsets, sizes, "destination")
        assert str(caught.value).startswith(f"destination: bytes [{offset}, +{size})")
    else:
        there.check_covers(offsets, sizes, "destination")


def test_neighbours_are_two_regions_and_no_span_crosses_their_edge():
    neighbours = RegionSet().add([Region(64, 64), Region(0, 64)])
    one = np.array([64], dtype=np.int64)
    neighbours.check_covers(one - 64, one, "source")
    neighbours.check_covers(one, one, "source")
    with pytest.raises(RegionError, match=r"\[63, \+2\)"):
        neighbours.check_covers(one - 1, np.array([2], dtype=np.int64), "source")


def test_an_offset_near_the_end_of_int64_does_not_wrap_round():
    there = RegionSet().add([Region(0, 64)])
    with pytest.raises(RegionError):
        there.check_covers(np.array([2**63 - 2]), np.array([4]), "source")


def test_an_unsorted_set_is_refused():
    with pytest.raises(RegionError):
        RegionSet((Region(64, 64), Region(0, 64)))


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 0), (8, -8)])
def test_a_region_has_bytes_and_a_place(offset, size):
    with pytest.raises(RegionError):
        Region(offset, size)


@BUDGET
@given(st.lists(regions, max_size=8), st.data())
def test_removal_leaves_the_others_and_the_generation(candidates, data):
    kept = disjoint(candidates)
    full = RegionSet().add(kept)
    gone = data.draw(st.sets(st.sampled_from(kept))) if kept else set()
    left = full.remove(gone)
    assert set(left.regions) == set(kept) - gone
    assert left.generation == full.generation == 1
    assert left.add(gone).regions == full.regions
    stranger = Region(100, 4)
    with pytest.raises(RegionError, match=r"offset=100, size=4.* is not registered \(1 such\)"):
        full.remove([*gone, stranger])
    for region in gone:
        with pytest.raises(RegionError):
            left.remove([region])
