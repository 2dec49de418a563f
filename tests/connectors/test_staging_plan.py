"""Pieces of a plan against what its boxes say, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.box_cases import BoxCase, box, box_cases
from support.planning import bytes_of_boxes

from connectors.host_copy import copy_host
from connectors.staging_plan import (
    LEAST_BYTES,
    MAX_STARTS,
    gather,
    piece_bytes,
    pieces_of,
    scatter,
)


@settings(max_examples=15, deadline=None)
@given(
    case=box_cases(max_starts=3),
    slot_bytes=st.sampled_from([13, 100, 257, 4096, 5000]),
    max_starts=st.integers(1, 6),
    max_boxes=st.integers(1, 3),
)
def test_pieces_are_the_plan_in_order_within_the_limits(
    case: BoxCase, slot_bytes: int, max_starts: int, max_boxes: int
) -> None:
    pieces = list(pieces_of(case.boxes, slot_bytes, max_starts, max_boxes))
    parts = [part for piece in pieces for part in piece.boxes]
    for found, wanted in zip(bytes_of_boxes(parts), bytes_of_boxes(case.boxes), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for piece in pieces:
        assert 0 < piece.size_bytes <= slot_bytes
        assert piece.size_bytes == sum(part.total_bytes for part in piece.boxes)
        assert sum(len(part.dst_starts) for part in piece.boxes) <= max_starts
        assert 0 < len(piece.boxes) <= max_boxes
        assert all(extent > 1 for part in piece.boxes for extent in part.extents)
        packed = np.arange(piece.size_bytes)
        for boxes, side in ((gather(piece.sources()), 1), (scatter(piece.destinations()), 0)):
            np.testing.assert_array_equal(bytes_of_boxes(boxes)[side], packed)


@settings(max_examples=10, deadline=None)
@given(case=box_cases(max_starts=3), slot_bytes=st.sampled_from([7, 64, 1000]))
def test_gathered_and_scattered_it_is_the_plain_copy(case: BoxCase, slot_bytes: int) -> None:
    random = np.random.default_rng(case.dst_bytes)
    source = random.integers(0, 256, case.src_bytes, dtype=np.uint8)
    target = random.integers(0, 256, case.dst_bytes, dtype=np.uint8)
    wanted = case.expected(source, target)
    slot = np.zeros(slot_bytes, dtype=np.uint8)
    for piece in pieces_of(case.boxes, slot_bytes):
        copy_host(gather(piece.sources()), source.ctypes.data, slot.ctypes.data)
        copy_host(scatter(piece.destinations()), slot.ctypes.data, target.ctypes.data)
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize(
    ("boxes", "sizes"),
    [
        ([], []),
        ([box([], [], 10)], []),
        ([box([0], [0], 10_000)], [8192, 1808]),
        ([box([0, 9000], [0, 9000], 9000)], [8192, 4904, 4904]),
        ([box([0], [0], 3000, (4,), (3000,), (5000,))], [6000, 6000]),
        ([box([0], [0], 5000, (2, 2), (9, 8), (9, 8))], [5000] * 4),
        ([box([0], [0], 100), box([500], [900], 8092), box([0], [9000], 1)], [8192, 1]),
    ],
)
def test_slots_are_filled(boxes: list, sizes: list[int]) -> None:
    assert [piece.size_bytes for piece in pieces_of(boxes, 8192)] == sizes


def test_many_small_runs_are_bounded_by_their_starts() -> None:
    starts = list(range(0, 30 * MAX_STARTS, 10))
    pieces = list(pieces_of([box(starts, starts, 8)], 1 << 20))
    assert [len(piece.boxes[0].dst_starts) for piece in pieces] == [MAX_STARTS] * 3


MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_starts", "start_mib", "num_slots", "sizes_mib"),
    [
        (512, 2, 4, [64] * 16),
        (40, 2, 4, [40, 40]),
        (51, 2, 8, [26, 26, 26, 24]),
        (3, 2, 8, [6]),
        (6, 2, 8, [4, 4, 4]),
        (1, 100, 4, [50, 50]),
        (1, 1, 1, [1]),
    ],
)
def test_small_plans_are_cut_so_that_slots_are_busy(
    num_starts: int, start_mib: int, num_slots: int, sizes_mib: list[int]
) -> None:
    starts = [index * start_mib * MIB for index in range(num_starts)]
    boxes = [box(starts, starts, start_mib * MIB), box([], [], 10)]
    limit = piece_bytes(boxes, 64 * MIB, num_slots)
    assert LEAST_BYTES <= limit <= 64 * MIB
    assert [piece.size_bytes / MIB for piece in pieces_of(boxes, limit)] == sizes_mib


def test_a_plan_without_bytes_has_no_pieces() -> None:
    assert piece_bytes([], 100, 4) == 100
    assert list(pieces_of([], piece_bytes([], 100, 4))) == []
