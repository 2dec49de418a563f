"""Boxes at random, and what copying them must do: every byte of the destination, touched or not.

One body for all that copies boxes: on the host, in Triton's interpreter, on GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

Copy = Callable[[Sequence[Box], int, int], None]
"""Boxes, base of the source, base of the destination; returns once the bytes are there."""

MAX_SOURCE = 4096


@dataclass(frozen=True)
class BoxCase:
    """Boxes between `src_bytes` and `dst_bytes` of memory, either moved off its alignment by
    `shift` bytes."""

    boxes: tuple[Box, ...]
    src_bytes: int
    dst_bytes: int
    shift: int = 0

    def expected(self, source: np.ndarray, before: np.ndarray) -> np.ndarray:
        """`before` with every run copied, one by one, with no array arithmetic."""
        after = before.copy()
        for box in self.boxes:
            for src0, dst0 in zip(box.src_starts.tolist(), box.dst_starts.tolist(), strict=True):
                for index in itertools.product(*map(range, box.extents)):
                    src = src0 + sum(i * s for i, s in zip(index, box.src_strides, strict=True))
                    dst = dst0 + sum(i * s for i, s in zip(index, box.dst_strides, strict=True))
                    assert 0 <= src <= self.src_bytes - box.run_bytes
                    assert 0 <= dst <= self.dst_bytes - box.run_bytes
                    after[dst : dst + box.run_bytes] = source[src : src + box.run_bytes]
        return after


def check(copy: Copy, case: BoxCase, src_device: str = "cpu", dst_device: str = "cpu") -> None:
    """Copy random bytes and compare all of the destination."""
    random = np.random.default_rng(case.src_bytes)
    source = random.integers(0, 256, case.src_bytes + case.shift, dtype=np.uint8)
    before = random.integers(0, 256, case.dst_bytes + case.shift, dtype=np.uint8)
    src = torch.from_numpy(source).to(src_device, copy=True)
    dst = torch.from_numpy(before).to(dst_device, copy=True)
    for device in {src_device, dst_device} - {"cpu"}:
        torch.cuda.synchronize(device)
    copy(case.boxes, src.data_ptr() + case.shift, dst.data_ptr() + case.shift)
    assert torch.equal(src.cpu(), torch.from_numpy(source)), "the source changed"
    wanted = case.expected(source[case.shift :], before[case.shift :])
    found = dst.cpu().numpy()
    np.testing.assert_array_equal(found[case.shift :], wanted)
    np.testing.assert_array_equal(found[: case.shift], before[: case.shift])


@st.composite
def box_cases(draw: st.DrawFn, max_starts: int = 5, max_boxes: int = 3) -> BoxCase:
    """Up to 4 extents, every alignment, gaps and none; sources overlap and repeat."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    boxes, dst_end = [], 0
    for _ in range(draw(st.integers(1, max_boxes))):
        box, dst_end = draw(_boxes(unit, dst_end, max_starts))
        boxes.append(box)
    return BoxCase(tuple(boxes), MAX_SOURCE, dst_end, draw(st.sampled_from([0, 0, 1, 8])))


@st.composite
def _boxes(draw: st.DrawFn, unit: int, dst_start: int, max_starts: int) -> tuple[Box, int]:
    extents = draw(st.lists(st.integers(2, 3), max_size=4).map(tuple))
    run = unit * draw(st.integers(1, 24))
    size, dst_strides = run, []
    for extent in reversed(extents):
        stride = size + unit * draw(st.integers(0, 2))
        dst_strides.insert(0, stride)
        size = stride * (extent - 1) + size
    room = MAX_SOURCE - run
    src_strides = []
    for extent in extents:
        most = min(600, room // (extent - 1)) // unit
        src_strides.append(unit * draw(st.integers(0, most)))
        room -= src_strides[-1] * (extent - 1)
    num_starts = draw(st.integers(0, max_starts))
    dst_starts, end = [], -(-dst_start // unit) * unit
    for _ in range(num_starts):
        dst_starts.append(end + unit * draw(st.integers(0, 1)))
        end = dst_starts[-1] + size
    src_starts = [unit * draw(st.integers(0, room // unit)) for _ in range(num_starts)]
    columns = (np.array(one, dtype=np.int64) for one in (src_starts, dst_starts))
    return Box(*columns, extents, tuple(src_strides), tuple(dst_strides), run), max(end, 1)


def layout_case(
    spec: KVCacheSpec, src: KVCacheLayout, dst: KVCacheLayout, num_blocks: int, tokens: range
) -> BoxCase:
    """What the planner makes of two layouts, for blocks at random places of twice as many."""
    random = np.random.default_rng(num_blocks)
    sides = []
    for layout in (src, dst):
        geometry = GroupGeometry.build(spec, layout, 2 * num_blocks, 4096)
        blocks = random.permutation(2 * num_blocks)[:num_blocks].tolist()
        regions = RegionSet((Region(0, geometry.total_bytes),))
        sides.append(CacheSide(geometry, regions, blocks))
    plan = plan_transfer(*sides, tokens)
    return BoxCase(plan.boxes, *(side.geometry.total_bytes for side in sides))


def box(
    src: Sequence[int],
    dst: Sequence[int],
    run_bytes: int,
    extents: tuple[int, ...] = (),
    src_strides: tuple[int, ...] = (),
    dst_strides: tuple[int, ...] = (),
) -> Box:
    columns = (np.array(one, dtype=np.int64) for one in (src, dst))
    return Box(*columns, extents, src_strides, dst_strides, run_bytes)
