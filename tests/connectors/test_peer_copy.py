"""Copies on the host are cut into slices, and move the same bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.peer_copy import HostCopier, sliced
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.runs import runs_of


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Destinations are dense and in order; sources are anywhere."""
    extents = tuple(draw(st.lists(st.integers(2, 4), max_size=3)))
    run_bytes = draw(st.integers(1, 40))
    strides = [run_bytes]
    for extent in reversed(extents):
        strides.insert(0, strides[0] * extent)
    num_starts = draw(st.integers(1, 5))
    src = draw(st.permutations(range(num_starts)))
    order = draw(st.permutations(range(len(extents))))
    return Box(
        np.array(src, dtype=np.int64) * strides[0],
        np.arange(num_starts, dtype=np.int64) * strides[0],
        extents,
        tuple(strides[1:]) if order == sorted(order) else tuple(strides[1:][::-1]),
        tuple(strides[1:]),
        run_bytes,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes(), max_size=3), st.integers(1, 200))
def test_slices_are_small_and_move_the_same_bytes(some: list[Box], slice_bytes: int) -> None:
    parts = list(sliced(some, slice_bytes))
    assert all(part.total_bytes <= slice_bytes for part in parts)
    if len(some) == 1:
        whole, cut = runs_of(some), runs_of(parts)
        for name in ("src_offsets", "dst_offsets", "sizes"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(cut, name))
    assert sum(part.total_bytes for part in parts) == sum(box.total_bytes for box in some)


def test_a_turn_copies_a_slice_or_two_first_come_first_served() -> None:
    source = np.arange(1000, dtype=np.uint64).view(np.uint8)
    targets = [np.zeros_like(source) for _ in range(2)]
    box = Box(np.zeros(1, np.int64), np.zeros(1, np.int64), (), (), (), source.nbytes)
    copier = HostCopier(1000)
    copies = [copier.start([box], source.ctypes.data, t.ctypes.data, "host") for t in targets]
    turns = []
    for _ in range(17):
        copier.begin_turn()
        turns.append([copier.is_finished(copy) for copy in copies])
        assert sum(int(np.count_nonzero(t)) for t in targets) <= 1000 * len(turns)
    assert turns.index([True, False]) == 8, "the first is whole before the second begins"
    assert turns[-1][1]
    for target in targets:
        np.testing.assert_array_equal(target, source)
