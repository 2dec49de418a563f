"""Boxes as copiers need them: the unit they move in, long runs, the copy kernel's table. Pure.

Facts relied on:
- n // d == (n × m) >> (31 + c) for 0 <= n < 2^31, c = ceil(log2 d), m = ceil(2^(31 + c) / d): m
  is too large by less than 1, so n × m / 2^(31 + c) is by less than 1 / d. Tested at the edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.boxes import Box, spread
from kvxfer.transfer.regions import Int64Array

AXES: Final = 3
"""Extents of a box in the table; those beyond are spread out into starts."""
HEADER: Final = 4
"""Words of the table for a box: rows, units of a run, where its starts for source and destination
lie in the table."""
AXIS: Final = 5
"""Words for an axis: extent, magic number, shift, strides of source and destination in units."""
PARAMETERS: Final = HEADER + AXIS * (AXES + 1)
"""Header and axes of a box; the innermost axis is the rows of a run."""
MAX_ROWS: Final = (1 << 31) - 1
MAX_UNIT: Final = 16
_WORD_BYTES: Final = 8
"""Of the widest word: a unit of 16 bytes is two."""
_MIN_COLS: Final = 8
_SHAPES_KEPT: Final = 512
"""What follows from the shape of a box, and not from its starts, is worked out once for each: boxes
come in few shapes, and it takes longer than the starts do."""


def unit_bytes(box: Box, src_base: int, dst_base: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides every address, stride and the run."""
    starts = [int(np.bitwise_or.reduce(one)) for one in (box.src_starts, box.dst_starts)]
    numbers = (src_base, dst_base, box.run_bytes, *box.src_strides, *box.dst_strides, *starts)
    bits = reduce(or_, numbers, limit)
    return bits & -bits


@dataclass(frozen=True, slots=True, eq=False)
class LongRuns:
    """Runs for copy engines; offsets and sizes in bytes."""

    src_offsets: list[int]
    dst_offsets: list[int]
    sizes: list[int]


def take_long_runs(box: Box, threshold_bytes: int) -> tuple[LongRuns, Box]:
    """Runs of `threshold_bytes` or more, once those of starts that adjoin on both sides are joined;
    and the rest of the box, perhaps without starts."""
    num_starts, run = len(box.dst_starts), box.run_bytes
    if num_starts * run < threshold_bytes:
        return LongRuns([], [], []), box
    gaps = (box.src_starts[1:] - box.src_starts[:-1] != run) | (
        box.dst_starts[1:] - box.dst_starts[:-1] != run
    )
    if run < threshold_bytes and gaps.all():  # the usual case
        return LongRuns([], [], []), box
    first, counts = _stretches(gaps)
    is_long = counts * run >= threshold_bytes
    joined = _with_starts(box, first[is_long])
    sizes = np.repeat(counts[is_long] * run, joined.num_runs // max(1, is_long.sum()))
    long = LongRuns(joined.src_offsets().tolist(), joined.dst_offsets().tolist(), sizes.tolist())
    return long, _with_starts(box, np.flatnonzero(~np.repeat(is_long, counts)))


def fold_rows(box: Box) -> list[Box]:
    """The box in parts, not empty, in which starts at the most usual distance from each other are
    one start and a first extent; its strides are no larger than the others, perhaps."""
    num_starts = len(box.dst_starts)
    if not box.total_bytes:
        return []
    src_steps, dst_steps = np.diff(box.src_starts), np.diff(box.dst_starts)
    src_step, dst_step = (np.sort(one)[len(one) // 2 :][:1] for one in (src_steps, dst_steps))
    first, counts = _stretches((src_steps != src_step) | (dst_steps != dst_step))
    if len(first) > num_starts // 2:
        return [box]
    parts = []
    for count in np.unique(counts).tolist():
        starts = first[counts == count]
        extents, src_strides, dst_strides = box.extents, box.src_strides, box.dst_strides
        if count > 1:
            extents = (count, *extents)
            src_strides = (int(src_step[0]), *src_strides)
            dst_strides = (int(dst_step[0]), *dst_strides)
        columns = box.src_starts[starts], box.dst_starts[starts]
        parts.append(Box(*columns, extents, src_strides, dst_strides, box.run_bytes))
    return parts


def _stretches(gaps: NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """First index and length of each stretch of entries, `gaps` being between neighbours."""
    first = np.concatenate([[0], np.flatnonzero(gaps) + 1])
    return first, np.diff(first, append=len(gaps) + 1)


def kernel_sized(box: Box, cols_bytes: int) -> Iterator[Box]:
    """The box in parts of at most AXES extents and, at `cols_bytes` a row, MAX_ROWS rows."""
    beyond = max(0, len(box.extents) - AXES)
    if beyond:
        outer, extents = box.extents[:beyond], box.extents[beyond:]
        box = Box(
            spread(box.src_starts, outer, box.src_strides[:beyond]),
            spread(box.dst_starts, outer, box.dst_strides[:beyond]),
            *(extents, box.src_strides[beyond:], box.dst_strides[beyond:], box.run_bytes),
        )
    num_starts = len(box.dst_starts)
    if not num_starts:
        return
    rows_per_start = box.num_runs // num_starts * -(-box.run_bytes // cols_bytes)
    if rows_per_start > MAX_ROWS:
        raise ConnectorError(f"box: {rows_per_start} rows of {cols_bytes} bytes from one start")
    step = MAX_ROWS // rows_per_start
    if num_starts <= step:
        yield box
        return
    for first in range(0, num_starts, step):
        yield _with_starts(box, slice(first, first + step))


def words_in(unit: int) -> int:
    return -(-unit // _WORD_BYTES)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernel cuts boxes: a tile is ROWS × COLS units; of narrow ones as many as there are
    words of 8 bytes in `tile_bytes`, a power of two."""

    tile_bytes: int

    def __post_init__(self) -> None:
        least = _MIN_COLS * MAX_UNIT
        if self.tile_bytes < least or self.tile_bytes & (self.tile_bytes - 1):
            reason = f"must be a power of two, {least} or more"
            raise UsageError("tile_bytes", self.tile_bytes, reason)

    def rows(self, unit: int, cols: int) -> int:
        return self._units(unit) // cols

    def cols(self, unit: int) -> list[int]:
        """What COLS may be: ascending, in steps of 4 ×, the last a whole tile."""
        whole = self._units(unit)
        steps = range(_MIN_COLS.bit_length() - 1, whole.bit_length() - 1, 2)
        return [*(1 << step for step in steps), whole]

    def _units(self, unit: int) -> int:
        return self.tile_bytes // _WORD_BYTES // words_in(unit)


@lru_cache(_SHAPES_KEPT)
def _cols(tiling: Tiling, run_bytes: int, unit: int) -> int:
    return choose_cols(run_bytes // unit, tiling.cols(unit))


def choose_cols(run_units: int, choices: Sequence[int]) -> int:
    """The longest row, of ascending `choices`, that leaves at most a tenth more of itself empty in
    a run than the best does."""
    filled = [run_units / (-(-run_units // cols) * cols) for cols in choices]
    return max(c for c, f in zip(choices, filled, strict=True) if f >= 0.9 * max(filled))


@dataclass(frozen=True, slots=True, eq=False)
class KernelJob:
    """One launch: what it reads, the unit and COLS that are compiled in, the steps of its largest
    box."""

    table: Int64Array
    unit: int
    cols: int
    num_steps: int


def kernel_jobs(
    boxes: Sequence[Box], src_base: int, dst_base: int, tiling: Tiling
) -> list[KernelJob]:
    """One job for all boxes of the same unit and COLS; those without bytes are left out."""
    by_variant: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        if box.total_bytes:
            unit = unit_bytes(box, src_base, dst_base, MAX_UNIT)
            cols = _cols(tiling, box.run_bytes, unit)
            parts = kernel_sized(box, cols * unit)
            by_variant.setdefault((unit, cols), []).extend(parts)
    jobs = []
    for (unit, cols), same in by_variant.items():
        table, num_rows = kernel_table(same, src_base, dst_base, unit, cols)
        jobs.append(KernelJob(table, unit, cols, -(-num_rows // tiling.rows(unit, cols))))
    return jobs


def kernel_table(
    boxes: Sequence[Box], src_base: int, dst_base: int, unit: int, cols: int
) -> tuple[Int64Array, int]:
    """The table of boxes that `kernel_sized` made, and the rows of the largest. Starts in it are
    absolute addresses, in units."""
    first = 1 + len(boxes) * PARAMETERS
    words, starts, most = [len(boxes)], [], 0
    for box in boxes:
        num_starts = len(box.dst_starts)
        shape = box.extents, box.src_strides, box.dst_strides
        rows_per_start, axes = _axes(*shape, box.run_bytes // unit, unit, cols)
        num_rows = num_starts * rows_per_start
        words += (num_rows, box.run_bytes // unit, first, first + num_starts, *axes)
        starts += [(box.src_starts, src_base), (box.dst_starts, dst_base)]
        first += 2 * num_starts
        most = max(most, num_rows)
    table = np.empty(first, dtype=np.int64)
    table[: len(words)] = words
    first = len(words)
    for column, base in starts:
        np.add(column, base, out=table[first : first + len(column)])
        first += len(column)
    table[len(words) :] >>= unit.bit_length() - 1  # a division takes several times as long
    return table, most


@lru_cache(_SHAPES_KEPT)
def _axes(
    extents: tuple[int, ...],
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    run_units: int,
    unit: int,
    cols: int,
) -> tuple[int, tuple[int, ...]]:
    """Rows of a start, and the words of all axes."""
    rows_per_run = -(-run_units // cols)
    words = _axis(1, 0, 0) * (AXES - len(extents))
    for extent, src, dst in zip(extents, src_strides, dst_strides, strict=True):
        words += _axis(extent, src // unit, dst // unit)
    words += _axis(rows_per_run, cols, cols)
    return math.prod(extents) * rows_per_run, tuple(words)


def _axis(extent: int, src_stride: int, dst_stride: int) -> list[int]:
    magic, shift = magic_divisor(extent)
    return [extent, magic, shift, src_stride, dst_stride]


def magic_divisor(divisor: int) -> tuple[int, int]:
    """(m, s), m < 2^32, such that n // divisor == (n × m) >> s for every n up to MAX_ROWS."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def _with_starts(box: Box, index: Int64Array | slice) -> Box:
    return Box(
        *(box.src_starts[index], box.dst_starts[index], box.extents),
        *(box.src_strides, box.dst_strides, box.run_bytes),
    )
