"""Copies on the host against runs copied one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from support.box_cases import BoxCase, box, box_cases, check, layout_case

from connectors import host_copy
from connectors.box_shapes import fold_rows
from connectors.host_copy import copy_host
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec

SPEC = KVCacheSpec(2, 2, 8, 8, "bfloat16", 4)
PAIRS = list(itertools.product(KVCacheLayout, KVCacheLayout))


@settings(max_examples=60, deadline=None)
@given(box_cases())
def test_every_byte_is_where_it_belongs(case):
    check(copy_host, case)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_long_and_short_starts_take_either_way(limit, monkeypatch):
    """The same boxes one start at a time, and as many at a time as fit into 300 bytes."""
    monkeypatch.setattr(host_copy, "_INDEXED_BELOW_BYTES", limit)
    monkeypatch.setattr(host_copy, "_INDEXED_BATCH_BYTES", 300)
    starts = np.random.default_rng(3).permutation(64) * 100
    boxes = [
        box(starts.tolist(), [i * 104 for i in range(64)], 100),
        box([8, 0], [8000, 8400], 40, (3, 2), (64, 1024), (96, 48)),
        box([5], [9001], 301),
    ]
    check(copy_host, BoxCase(tuple(boxes), 6400, 9400))


@pytest.mark.parametrize("src, dst", PAIRS, ids="-".join)
def test_layout_pairs_with_partial_blocks(src, dst):
    check(copy_host, layout_case(SPEC, src, dst, 5, range(3, 18)))


def test_a_run_longer_than_any_batch():
    size = (1 << 20) + 3
    check(copy_host, BoxCase((box([1], [0], size), box([0], [size], 5)), size + 1, size + 5))


def test_blocks_in_a_row_are_one_start():
    """Three rows of two lengths, one of them of a single start; and one that goes backwards."""
    src = [500, 700, 900, 0, 300, 1500, 1700, 1900]
    dst = [0, 100, 200, 350, 450, 560, 660, 760]
    nest = box(src, dst, 20, (2,), (40,), (30,))
    assert [(len(b.dst_starts), b.extents) for b in fold_rows(nest)] == [(2, (2,)), (2, (3, 2))]
    back = box([400, 300, 200, 100], [1000, 1200, 1400, 1600], 90)
    (folded,) = fold_rows(back)
    assert (folded.extents, folded.src_strides, folded.dst_strides) == ((4,), (-100,), (200,))
    check(copy_host, BoxCase((nest, back), 2000, 2000))


def test_nothing_moves_for_no_boxes_and_no_starts():
    check(copy_host, BoxCase((), 1, 1))
    check(copy_host, BoxCase((box([], [], 8),), 1, 1))
