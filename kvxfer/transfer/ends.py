"""The two ends of a plan and the pieces that move between them. Pure numpy.

Fact relied on: both layouts are nested (an outer stride is at least the inner extent times the
inner stride), so axes taken by descending stride enumerate offsets in ascending order; the tests
check it by the order of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvxfer.cache.layout import AXES, GroupGeometry
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.boxes import Box, Stretches
from kvxfer.transfer.regions import Int64Array


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of which each start has as many, and the layers and heads (global) of them."""

    starts: range
    """The first token of each start; the step is the distance between two."""
    num_tokens: int
    """From each of `starts` on, within one block of either side."""
    layers: range
    heads: range


@lru_cache(maxsize=256)
def _by_axis(strides: tuple[int, ...]) -> Mapping[str, int]:
    """Of a geometry, of which there are few, asked for many times a plan."""
    return dict(zip(AXES, strides, strict=True))


@dataclass(frozen=True, slots=True)
class End:
    """A side, narrowed to the blocks that the tokens touch."""

    geometry: GroupGeometry
    blocks: Int64Array
    first_entry: int
    """That of blocks[0]."""
    first_head: int
    """The global number of the geometry's head 0."""
    lowest: int
    highest: int
    """Of `blocks`."""

    @property
    def strides(self) -> Mapping[str, int]:
        return _by_axis(self.geometry.strides)

    def starts(self, piece: Piece) -> Int64Array:
        """Where the first byte that moves lies, start by start."""
        size, strides = self.geometry.spec.block_size, self.strides
        first = piece.starts
        base = self.geometry.offset + piece.layers.start * strides["L"]
        base += (piece.heads.start - self.first_head) * strides["H"]
        entry, found = first.start // size - self.first_entry, self.blocks
        if first.step == size:  # each is in a block of its own, at the same slot
            found = found[entry : entry + len(first)] * strides["B"]
            return found + (first.start % size * strides["N"] + base)
        tokens = np.arange(first.start, first.stop, first.step, dtype=np.int64)
        found = found[tokens // size - self.first_entry] * strides["B"]
        return found + tokens % size * strides["N"] + base


def pieces(tokens: range, units: tuple[int, int], layers: range, heads: range) -> list[Piece]:
    """`tokens` in at most five pieces, none empty. `units` are the smaller block size and the
    destination's, a multiple of it.

    A first small block's tail, whole small blocks to where the destination's next block begins,
    whole blocks of the destination, small blocks again, and a last one's head. With one block size
    for both, three. Whole blocks of the destination are a piece of their own since their small
    blocks lie alike in each, which spares `runs_of` a sort.
    """
    small, large = units
    first = min(_up(tokens.start, small), tokens.stop)
    last = max(_down(tokens.stop, small), first)
    first_large = min(_up(first, large), last)
    last_large = max(_down(last, large), first_large)
    bounds = (tokens.start, first, first_large, last_large, last, tokens.stop)
    found = []
    for start, stop in pairwise(bounds):
        if start < stop:
            each = min(small, stop - start)
            found.append(Piece(range(start, stop, small), each, layers, heads))
    return found


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _down(value: int, multiple: int) -> int:
    return value // multiple * multiple


def box_of(src: End, dst: End, piece: Piece) -> Box:
    """The runs of one piece, blind to regions."""
    src_starts, dst_starts = src.starts(piece), dst.starts(piece)
    if (dst_starts[1:] < dst_starts[:-1]).any():
        order = np.argsort(dst_starts)
        src_starts, dst_starts = src_starts[order], dst_starts[order]
    spec = src.geometry.spec
    extents = tuple(_extents(spec, piece).items())
    nest = _nest(src.geometry.strides, dst.geometry.strides, extents, spec.itemsize)
    return Box(src_starts, dst_starts, *nest)


@lru_cache(maxsize=256)
def _nest(
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    extents: tuple[tuple[str, int], ...],
    itemsize: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """The extents, source strides, destination strides and run bytes of a box. Of two geometries
    and the shape of a piece, whatever its blocks: there are few."""
    src, dst, size_of = _by_axis(src_strides), _by_axis(dst_strides), dict(extents)
    inside, size = _common_run(src, dst, size_of, itemsize)
    outside = [axis for axis, extent in extents if extent > 1 and axis not in inside]
    outside.sort(key=dst.__getitem__, reverse=True)
    return (
        tuple(size_of[axis] for axis in outside),
        tuple(src[axis] for axis in outside),
        tuple(dst[axis] for axis in outside),
        size,
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the boxes of a group were made of: those of fewer layers follow without another look at
    blocks and regions."""

    src: End
    dst: End
    pieces: tuple[Piece, ...]

    def boxes(self, layers: range) -> tuple[Box, ...]:
        """Of some of the layers that the recipe was made for."""
        some = (replace(piece, layers=layers) for piece in self.pieces if layers)
        return tuple(box_of(self.src, self.dst, piece) for piece in some)


def stretches_of(end: End, piece: Piece) -> Stretches:
    """What one end reads or writes of a piece, as long as that end alone allows: a whole page
    where the runs between two layouts may be one token of one head."""
    spec = end.geometry.spec
    extents = _extents(spec, piece)
    return Stretches.build(
        end.starts(piece),
        tuple(extents.values()),
        tuple(end.strides[axis] for axis in extents),
        spec.itemsize,
    )


def _extents(spec: KVCacheSpec, piece: Piece) -> dict[str, int]:
    return {
        "L": len(piece.layers),
        "H": len(piece.heads),
        "N": piece.num_tokens,
        "C": spec.content_dim,
    }


def _common_run(
    src: Mapping[str, int], dst: Mapping[str, int], extents: Mapping[str, int], itemsize: int
) -> tuple[list[str], int]:
    """The axes inside the longest run that is contiguous on both sides, and its bytes.

    B is not among them: block ids are arbitrary, and where they are not, `coalesce` sees it.
    """
    size = itemsize
    inside: list[str] = []
    outside = [axis for axis, extent in extents.items() if extent > 1]
    while (axis := next((a for a in outside if src[a] == dst[a] == size), None)) is not None:
        size *= extents[axis]
        inside.append(axis)
        outside.remove(axis)
    return inside, size
