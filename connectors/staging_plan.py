"""Plans cut into pieces that fit a slot of a staging ring, and how a piece lies in it. Pure numpy.

packed   a piece's bytes in a slot: box after box, starts outermost, then extents, then the run,
         with no gap. Both ends derive it from what they know: the source from the boxes that it
         reads, the destination from those that it writes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvxfer.transfer.boxes import Box, Stretches
from kvxfer.transfer.regions import Int64Array

MAX_STARTS = 8192
"""Of one piece: 64 KiB of the message that names them."""
MAX_BOXES = 64
_CUT_BYTES = 4096
"""Runs longer than a slot are cut at multiples of this, so that no part is off its alignment."""

LEAST_BYTES = 4 << 20
"""A piece is not made smaller so that there are more: what there is to say of it takes as long as
it does to be written over NVLink."""


@dataclass(frozen=True, slots=True, eq=False)
class Nest:
    """One side of a box: `run_bytes` at each start plus each sum of index × stride, in order."""

    starts: Int64Array
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    run_bytes: int

    @property
    def total_bytes(self) -> int:
        return len(self.starts) * self.bytes_per_start

    @property
    def bytes_per_start(self) -> int:
        return math.prod(self.extents) * self.run_bytes

    def bounds(self) -> tuple[int, int]:
        """The lowest start and the highest."""
        return int(self.starts.min()), int(self.starts.max())

    def stretches(self) -> Stretches:
        return Stretches.build(self.starts, self.extents, self.strides, self.run_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive bytes of a plan, `size_bytes` in all."""

    boxes: tuple[Box, ...]
    size_bytes: int

    def sources(self) -> tuple[Nest, ...]:
        return tuple(Nest(b.src_starts, b.extents, b.src_strides, b.run_bytes) for b in self.boxes)

    def destinations(self) -> tuple[Nest, ...]:
        return tuple(Nest(b.dst_starts, b.extents, b.dst_strides, b.run_bytes) for b in self.boxes)


def gather(nests: Sequence[Nest]) -> list[Box]:
    """From where they lie to where they are packed, offset 0 being the slot's first byte."""
    return [
        Box(nest.starts, starts, nest.extents, nest.strides, strides, nest.run_bytes)
        for nest, starts, strides in _packed(nests)
    ]


def scatter(nests: Sequence[Nest]) -> list[Box]:
    """The way back."""
    return [
        Box(starts, nest.starts, nest.extents, strides, nest.strides, nest.run_bytes)
        for nest, starts, strides in _packed(nests)
    ]


def _packed(nests: Sequence[Nest]) -> Iterator[tuple[Nest, Int64Array, tuple[int, ...]]]:
    offset = 0
    for nest in nests:
        inner = nest.run_bytes
        strides: list[int] = []
        for extent in reversed(nest.extents):
            strides.insert(0, inner)
            inner *= extent
        end = offset + len(nest.starts) * inner
        yield nest, np.arange(offset, end, inner, dtype=np.int64), tuple(strides)
        offset = end


def piece_bytes(boxes: Sequence[Box], slot_bytes: int, num_slots: int) -> int:
    """The limit for pieces of `boxes`: a slot, or less where they would not fill half of the slots,
    so that gather, write and scatter go on side by side. Starts as they are make equal pieces."""
    full = [box for box in boxes if box.total_bytes]
    total = sum(box.total_bytes for box in full)
    parts = max(1, min(num_slots // 2, total // LEAST_BYTES))
    share = -(-total // parts)
    starts = [box.total_bytes // len(box.dst_starts) for box in full]
    spare = max((one - 1 for one in starts if one <= share), default=0)
    return min(slot_bytes, max(LEAST_BYTES, share + spare))


def pieces_of(
    boxes: Sequence[Box], slot_bytes: int, max_starts: int = MAX_STARTS, max_boxes: int = MAX_BOXES
) -> Iterator[Piece]:
    """All bytes of `boxes`, once and in order, in pieces within the limits, which are positive."""
    cutter = _Cutter(slot_bytes, max_starts, max_boxes)
    for box in boxes:
        yield from cutter.add(box)
    if cutter.boxes:
        yield cutter.finish()


class _Cutter:
    """Fills one piece after the other."""

    def __init__(self, slot_bytes: int, max_starts: int, max_boxes: int) -> None:
        self._limits = slot_bytes, max_starts, max_boxes
        self._begin()

    def add(self, box: Box) -> Iterator[Piece]:
        """The pieces that `box` completes."""
        slot_bytes, num_starts = self._limits[0], len(box.dst_starts)
        if not box.total_bytes:
            return
        bytes_per_start = box.total_bytes // num_starts
        if bytes_per_start <= slot_bytes:
            yield from self._fill(num_starts, bytes_per_start, partial(_some_starts, box))
        elif num_starts > 1:
            for index in range(num_starts):
                yield from self.add(_some_starts(box, index, 1))
        elif not box.extents:
            unit = min(_CUT_BYTES, slot_bytes)
            stretch = partial(_some_bytes, box, unit)
            yield from self._fill(-(-box.run_bytes // unit), unit, stretch)
        elif bytes_per_start // box.extents[0] <= slot_bytes:
            inner = bytes_per_start // box.extents[0]
            yield from self._fill(box.extents[0], inner, partial(_some_rows, box))
        else:
            for index in range(box.extents[0]):
                yield from self.add(_some_rows(box, index, 1))

    def finish(self) -> Piece:
        piece = Piece(tuple(self.boxes), self._limits[0] - self._bytes_left)
        self._begin()
        return piece

    def _begin(self) -> None:
        self.boxes: list[Box] = []
        self._bytes_left, self._starts_left, self._boxes_left = self._limits

    def _fill(
        self, count: int, unit_bytes: int, part: Callable[[int, int], Box]
    ) -> Iterator[Piece]:
        """`count` units, as many at a time as there is room for; `part` says what (first, number)
        of them are. No unit has more than one start."""
        first = 0
        while first < count:
            number = min(self._bytes_left // unit_bytes, self._starts_left, count - first)
            if not number or not self._boxes_left:
                yield self.finish()
                continue
            box = part(first, number)
            self.boxes.append(box)
            self._bytes_left -= box.total_bytes
            self._starts_left -= len(box.dst_starts)
            self._boxes_left -= 1
            first += number


def _some_starts(box: Box, first: int, number: int) -> Box:
    some = slice(first, first + number)
    src, dst = box.src_starts[some], box.dst_starts[some]
    return Box(src, dst, box.extents, box.src_strides, box.dst_strides, box.run_bytes)


def _some_rows(box: Box, first: int, number: int) -> Box:
    """Indices [first, first + number) of the outermost axis."""
    src = box.src_starts + first * box.src_strides[0]
    dst = box.dst_starts + first * box.dst_strides[0]
    keep = slice(0 if number > 1 else 1, None)
    extents = (number, *box.extents[1:])[keep]
    return Box(src, dst, extents, box.src_strides[keep], box.dst_strides[keep], box.run_bytes)


def _some_bytes(box: Box, unit: int, first: int, number: int) -> Box:
    """Units [first, first + number) of each run; the last may be shorter."""
    start = first * unit
    size = min(number * unit, box.run_bytes - start)
    return Box(box.src_starts + start, box.dst_starts + start, (), (), (), size)
