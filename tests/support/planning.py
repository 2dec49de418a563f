"""What a plan has to do, told by logical indices alone: nothing here asks the planner's modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvxfer.cache.layout import GroupGeometry
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.transfer.runs import Runs


def bytes_of(
    geometry: GroupGeometry,
    table: dict[int, int],
    tokens: range,
    heads: Sequence[int],
    layers: Sequence[int],
) -> np.ndarray:
    """[layers, heads, tokens, content bytes]: where each byte lies; `heads` are the geometry's own
    numbers, `table` says which block an entry is in."""
    spec = geometry.spec
    at = np.array(tokens, dtype=np.int64)
    blocks = np.array([table[t // spec.block_size] for t in tokens], dtype=np.int64)
    strides = dict(zip("LBHNC", geometry.strides, strict=True))
    by_token = blocks * strides["B"] + at % spec.block_size * strides["N"]
    content = np.arange(spec.content_dim)[:, None] * strides["C"] + np.arange(spec.itemsize)
    return (
        geometry.offset
        + np.array(layers, dtype=np.int64)[:, None, None, None] * strides["L"]
        + np.array(heads, dtype=np.int64)[None, :, None, None] * strides["H"]
        + by_token[None, None, :, None]
        + content.ravel()
    )


def chunked(geometry: GroupGeometry, rng: np.random.Generator, share: float) -> RegionSet:
    """The whole of a group, each segment cut at about `share` of the places between granules."""
    regions = []
    for segment in range(geometry.num_segments):
        start = geometry.segment_offset(segment)
        end = start + geometry.segment_stride_bytes
        between = np.arange(start + geometry.granularity, end, geometry.granularity)
        cuts = between[rng.random(len(between)) < share].tolist()
        pairs = itertools.pairwise([start, *cuts, end])
        regions += [Region(left, right - left) for left, right in pairs]
    return RegionSet().add(regions)


def bytes_of_runs(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """(source byte, destination byte) of all that moves, run by run."""
    within = np.arange(int(runs.sizes.sum())) - np.repeat(
        np.cumsum(runs.sizes) - runs.sizes, runs.sizes
    )
    return (
        np.repeat(runs.src_offsets, runs.sizes) + within,
        np.repeat(runs.dst_offsets, runs.sizes) + within,
    )


def bytes_of_boxes(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    """The same from boxes, index by index of their definition."""
    src, dst = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for box in boxes:
        num_runs = int(np.prod(box.extents))
        indices = np.indices(box.extents).reshape(len(box.extents), num_runs)
        for found, starts, strides in (
            (src, box.src_starts, box.src_strides),
            (dst, box.dst_starts, box.dst_strides),
        ):
            inner = np.array(strides, dtype=np.int64) @ indices
            offsets = (starts[:, None] + inner).ravel()
            found.append((offsets[:, None] + np.arange(box.run_bytes)).ravel())
    return np.concatenate(src), np.concatenate(dst)


def check_form(plan: TransferPlan, src: RegionSet, dst: RegionSet) -> None:
    """Runs ascend, lie in one region each, cannot be fewer, and are the boxes' bytes."""
    runs = plan.runs
    from_runs, to_runs = bytes_of_runs(runs)
    from_boxes, to_boxes = bytes_of_boxes(plan.boxes)
    order = np.argsort(to_boxes, kind="stable")
    assert np.array_equal(to_boxes[order], to_runs)
    assert np.array_equal(from_boxes[order], from_runs)
    assert (np.diff(to_runs) > 0).all()
    for box in plan.boxes:
        assert all(extent > 1 for extent in box.extents)
        assert list(box.dst_strides) == sorted(box.dst_strides, reverse=True)
        assert (np.diff(box.dst_starts) > 0).all()
    for column in (runs.src_offsets, runs.dst_offsets, runs.sizes):
        assert column.dtype == np.int64
        assert column.flags.c_contiguous
    for regions, offsets in ((src, runs.src_offsets), (dst, runs.dst_offsets)):
        index = np.searchsorted(regions.starts, offsets, side="right") - 1
        assert (index >= 0).all()
        assert (offsets + runs.sizes <= regions.ends[index]).all()
    goes_on = (np.diff(to_runs) == 1) & (np.diff(from_runs) == 1)
    goes_on &= ~np.isin(to_runs[1:], dst.starts) & ~np.isin(from_runs[1:], src.starts)
    assert runs.num_runs == len(to_runs) - int(goes_on.sum())
