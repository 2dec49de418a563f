"""Prepared lists: right indices, built when they pay, and given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from connectors.nixl_lists import (
    MAX_LISTS,
    MAX_ROWS,
    MAX_SHAPES,
    RUNS_PER_ROW,
    ListCache,
    Selection,
    lists_pay,
    sort_by_shape,
)
from kvxfer.transfer.regions import Int64Array, Region, RegionSet

KIB = 1024
MIN_RUNS = 64


@dataclass
class Transport:
    """Prepares as NIXL does: a handle stands for what its rows spell out, in their order."""

    regions: RegionSet
    held: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    prepared: int = 0

    def prepare(self, rows: Int64Array) -> int:
        places = []
        for offset, size, stride, number in rows.tolist():
            assert stride >= size > 0 and number > 0
            places += [(offset + i * stride, size) for i in range(number)]
            last = np.array([places[-1][0] + size - 1])
            self.regions.check_covers(np.array([offset]), last - offset + 1, "row")
        self.prepared += 1
        self.held[self.prepared] = places
        return self.prepared

    def release(self, handle: int) -> None:
        del self.held[handle]  # KeyError for one that was released before

    def spell(self, taken: Selection) -> list[tuple[int, int]]:
        places = self.held[taken.units.handle]
        return [places[index] for index in taken.indices.tolist()]


def regions_of(*pairs: tuple[int, int]) -> RegionSet:
    return RegionSet(tuple(Region(offset * KIB, size * KIB) for offset, size in pairs))


TWO = regions_of((64, 256), (512, 128))


def make(regions: RegionSet = TWO) -> tuple[ListCache, Transport]:
    transport = Transport(regions)
    cache = ListCache(transport.release)
    cache.know("a", regions, transport.prepare)
    return cache, transport


def pages(size: int = KIB, num: int = 100, start: int = 64 * KIB) -> tuple[Int64Array, Int64Array]:
    """`num` runs of `size` bytes, one behind the other."""
    offsets = start + np.arange(num, dtype=np.int64) * size
    return offsets, np.full(num, size, dtype=np.int64)


@st.composite
def runs_in_regions(draw: st.DrawFn) -> tuple[RegionSet, Int64Array, Int64Array]:
    """Regions on a grid of 4 KiB, and runs of two sizes and a few alignments within them."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    regions, end = [], 0
    for gap, length in zip(gaps, lengths, strict=True):
        regions.append(Region((end + gap) * 4 * KIB, length * 4 * KIB))
        end += gap + length
    sizes = draw(st.lists(st.sampled_from([96, 256, 1000, 4096]), min_size=1, max_size=2))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(MIN_RUNS + 40):
        region, size = regions[rng.integers(len(regions))], sizes[rng.integers(len(sizes))]
        shift = int(rng.choice([0, 32]))
        first = -(-(region.offset - shift) // size)
        last = (region.end - shift) // size
        if last > first:
            rows.append((int(rng.integers(first, last)) * size + shift, size))
    assume(rows)
    offsets, found = np.array(rows, dtype=np.int64).T.copy()
    return RegionSet(tuple(regions)), offsets, found


@settings(max_examples=60, deadline=None)
@given(runs_in_regions())
def test_indices_name_exactly_the_runs(case: tuple[RegionSet, Int64Array, Int64Array]) -> None:
    regions, offsets, sizes = case
    cache, transport = make(regions)
    cache.take("a", offsets, sizes)  # a list of many rows is made at the second time
    taken = cache.take("a", offsets, sizes)
    assert taken is not None
    assert transport.spell(taken) == list(zip(offsets.tolist(), sizes.tolist(), strict=True))


def test_lists_pay_for_many_runs_and_for_many_regions() -> None:
    assert not lists_pay(1000, 1000)
    assert not lists_pay(4096, 4)
    assert lists_pay(4096, 256)
    assert lists_pay(16384, 4)


def test_many_shapes_get_no_list() -> None:
    cache, transport = make()
    sizes = np.arange(1, 101, dtype=np.int64)
    assert cache.take("a", 64 * KIB + sizes * 200, sizes) is None
    assert sort_by_shape(sizes * 2, sizes * 0 + 2 * MAX_SHAPES + 2) is None  # by their residues
    assert transport.prepared == 0


def test_a_list_of_many_rows_is_made_for_the_second_transfer() -> None:
    many = regions_of(*((i * 4, 4) for i in range(50)))
    cache, transport = make(many)
    runs = pages(num=100, start=0)
    assert len(many.regions) * RUNS_PER_ROW > 100
    assert cache.take("a", *runs) is None
    assert cache.take("a", *runs) is not None
    assert transport.prepared == 1


def test_regions_too_many_or_too_crooked_get_no_list() -> None:
    for regions in (
        regions_of(*((i * 2, 1) for i in range(MAX_ROWS + 1))),
        RegionSet((Region(1, 1 << 21),)),
    ):
        cache, transport = make(regions)
        runs = pages(128, start=1)
        assert cache.take("a", *runs) is None
        assert cache.take("a", *runs) is None
        assert transport.prepared == 0


def test_a_list_is_used_again_until_it_lacks_a_region() -> None:
    cache, transport = make()
    old = cache.take("a", *pages())
    assert old is not None
    grown = TWO.add([Region(1024 * KIB, 256 * KIB)])
    transport.regions = grown
    cache.know("a", grown, transport.prepare)
    again = cache.take("a", *pages())
    assert again is not None and again.units is old.units
    beyond = pages(start=1024 * KIB)
    new = cache.take("a", *beyond)
    assert new is not None and new.units is not old.units
    assert transport.spell(new)[0] == (1024 * KIB, KIB)
    assert len(transport.held) == 2, "transfers of the old one are under way"
    cache.give_back(old.units)
    assert len(transport.held) == 2
    cache.give_back(again.units)
    assert list(transport.held) == [new.units.handle]


def test_refresh_brings_lists_up_to_date_one_by_one() -> None:
    cache, transport = make()
    for size in (KIB, 2 * KIB):
        taken = cache.take("a", *pages(size, num=MIN_RUNS))
        assert taken is not None
        cache.give_back(taken.units)
    cache.refresh()
    assert transport.prepared == 2
    grown = TWO.add([Region(1024 * KIB, 256 * KIB)])
    transport.regions = grown
    cache.know("a", grown, transport.prepare)
    for prepared in (3, 4, 4):
        cache.refresh()
        assert (transport.prepared, len(transport.held)) == (prepared, 2)
    assert cache.take("a", *pages(start=1024 * KIB)) is not None
    assert transport.prepared == 4


def test_regions_that_went_take_their_lists_along() -> None:
    cache, transport = make()
    taken = cache.take("a", *pages())
    assert taken is not None
    less = regions_of((64, 256))
    transport.regions = less
    cache.know("a", less, transport.prepare)
    assert len(transport.held) == 1, "a transfer uses it"
    fresh = cache.take("a", *pages())
    assert fresh is not None and fresh.units is not taken.units
    cache.give_back(taken.units)
    assert list(transport.held) == [fresh.units.handle]


def test_forgetting_releases_what_no_transfer_uses() -> None:
    cache, transport = make()
    used, idle = (cache.take("a", *pages(size, num=MIN_RUNS)) for size in (KIB, 2 * KIB))
    assert used is not None and idle is not None
    cache.give_back(idle.units)
    cache.forget("a")
    cache.forget("a")
    cache.forget("stranger")
    assert list(transport.held) == [used.units.handle]
    cache.give_back(used.units)
    assert not transport.held


def test_the_list_not_used_for_longest_goes_first() -> None:
    cache, transport = make()
    kept = cache.take("a", *pages())
    assert kept is not None
    for size in range(16, 16 + MAX_LISTS + 3):
        taken = cache.take("a", *pages(size, num=MIN_RUNS, start=size * 64 * KIB // size))
        if taken is not None:
            cache.give_back(taken.units)
        again = cache.take("a", *pages())
        assert again is not None and again.units is kept.units
        cache.give_back(again.units)
    assert len(transport.held) <= MAX_LISTS


def test_what_cannot_be_prepared_leaves_nothing_behind() -> None:
    cache, transport = make()

    def refuse(rows: Int64Array) -> int:
        raise OSError("no")

    cache.know("b", TWO, refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            cache.take("b", *pages())
    cache.forget("b")
    assert not transport.held
