"""Sets of ranges, against sets of bytes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.memory.ranges import Range, merged, without

BUDGET = settings(max_examples=200, deadline=None, derandomize=True)


def ranges_of(members):
    return merged(Range(byte, 1) for byte in members)


def bytes_of(ranges):
    return {byte for item in ranges for byte in range(item.offset, item.end)}


byte_sets = st.sets(st.integers(0, 40))


@BUDGET
@given(byte_sets)
def test_merged_ranges_are_the_same_bytes_with_gaps_between(members):
    found = ranges_of(members)
    assert bytes_of(found) == members
    assert all(left.end < right.offset for left, right in itertools.pairwise(found))


@BUDGET
@given(byte_sets, byte_sets)
def test_without_cuts_out_exactly_what_was_taken(members, taken):
    left = without(ranges_of(members), ranges_of(taken))
    assert bytes_of(left) == members - taken
    assert list(left) == sorted(left)
    assert sum(item.size for item in left) == len(members - taken)
