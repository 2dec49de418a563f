"""The demo's proof of growth in flight, on traces that do and do not hold one."""

import pytest

from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.demo.checks import GrowthInFlight, growth_in_flight, growths, why_no_growth


def end(request, start_ns, end_ns):
    return {
        "event": "transfer_end",
        "request": request,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "lane": "push",
    }


def generation(number, at_ns, old_blocks, new_blocks):
    return {
        "event": "generation",
        "generation": number,
        "at_ns": at_ns,
        "old_blocks": [old_blocks],
        "new_blocks": [new_blocks],
    }


def filled(request, *blocks, at_ns=1000):
    return {"event": "filled", "request": request, "blocks": [list(blocks)], "at_ns": at_ns}


FIRST = generation(1, 10, 1, 8)
SECOND = generation(2, 50, 8, 16)
GROWER = filled("grower", 5, 8, 9)


def test_the_first_extension_is_no_growth():
    assert growths([FIRST, SECOND, GROWER]) == [SECOND]


def test_a_growth_that_a_transfer_spans_is_found():
    found = growth_in_flight([end("companion", 40, 60)], [FIRST, SECOND, GROWER])
    assert found == GrowthInFlight("companion", 40, 50, 60, 2, 8, 16, "grower")


NOT_IN_FLIGHT = {
    "ended before": ([end("companion", 20, 49)], [FIRST, SECOND, GROWER]),
    "ended just then": ([end("companion", 20, 50)], [FIRST, SECOND, GROWER]),
    "began after": ([end("companion", 51, 90)], [FIRST, SECOND, GROWER]),
    "began just then": ([end("companion", 50, 90)], [FIRST, SECOND, GROWER]),
    "only the first extension": ([end("companion", 5, 15)], [FIRST, GROWER]),
    "nothing landed": ([end("companion", 40, 60)], [FIRST, SECOND]),
    "landed below": ([end("companion", 40, 60)], [FIRST, SECOND, filled("grower", 5, 7)]),
    "landed before the growth": (
        [end("companion", 40, 60)],
        [FIRST, SECOND, filled("grower", 8, at_ns=49)],
    ),
    "landed beyond it": ([end("companion", 40, 60)], [FIRST, SECOND, filled("grower", 16)]),
    "its own bytes": ([end("grower", 40, 60)], [FIRST, SECOND, GROWER]),
    "no transfer": ([{"event": "transfer_start", "request": "x"}], [FIRST, SECOND, GROWER]),
    "no traces": ([], []),
}


@pytest.mark.parametrize("traces", NOT_IN_FLIGHT.values(), ids=NOT_IN_FLIGHT)
def test_anything_less_is_no_proof(traces):
    assert growth_in_flight(*traces) is None


def test_a_later_growth_may_prove_it():
    third = generation(3, 80, 16, 32)
    trace = [FIRST, SECOND, GROWER, third, filled("late", 20)]
    found = growth_in_flight([end("companion", 70, 90)], trace)
    assert (found.generation, found.landed_request) == (3, "late")


def test_of_several_groups_each_counts_for_itself():
    """Blocks of one group prove nothing of another; what grew is told as a sum."""
    grown = {**SECOND, "old_blocks": [8, 4], "new_blocks": [16, 4]}
    below = {**GROWER, "blocks": [[5, 7], [8, 9]]}
    inside = {**GROWER, "blocks": [[5, 9], [1]]}
    companion = [end("companion", 40, 60)]
    assert growth_in_flight(companion, [FIRST, grown, below]) is None
    found = growth_in_flight(companion, [FIRST, grown, inside])
    assert (found.old_blocks, found.new_blocks) == (12, 20)


FULL = KVCacheSpec(1, 1, 8, 8, "float32", 16)
SLIDING = KVCacheSpec(1, 1, 8, 8, "float32", 16, GroupKind.SLIDING, 32)
CROSS = KVCacheSpec(1, 1, 8, 8, "float32", 16, GroupKind.CROSS)


@pytest.mark.parametrize(
    "specs, commit, why",
    [
        ([FULL], "elastic", ""),
        ([SLIDING, FULL], "elastic", ""),
        ([FULL], "all", "from the start"),
        ([SLIDING], "elastic", "window"),
        ([FULL, CROSS], "elastic", "encoder"),
    ],
)
def test_where_decode_cannot_be_made_to_grow_it_is_said_why(specs, commit, why):
    found = why_no_growth(specs, commit)
    assert bool(found) == bool(why)
    assert why in found
