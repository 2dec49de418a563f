"""From two cache geometries and two block tables to the bytes that must move. Pure numpy.

Facts that this file relies on, checked by the tests against moving every element by itself:
- Both layouts are nested (an outer stride is at least the inner extent times the inner stride), so
  axes taken by descending stride enumerate offsets in ascending order.
- A destination byte is written once, so of all runs at most one starts where another ends: in the
  order of destination offsets, joining neighbours finds every join that there is.
- Regions are disjoint, so cutting at their starts is enough: a run that reaches past the end of
  one where no other starts touches unregistered bytes, and the coverage check refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvxfer.cache.layout import AXES, GroupGeometry
from kvxfer.errors import PlanError
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.regions import Int64Array, RegionSet
from kvxfer.transfer.runs import Runs, cut, runs_of, split

_NO_EDGES: Int64Array = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """What moves: `boxes` for who copies by address, `runs` for who needs descriptors.

    Boxes may reach across edges of regions, which lie at neighbouring addresses; runs may not.
    """

    boxes: tuple[Box, ...]
    src_edges: Int64Array = field(default_factory=_NO_EDGES.copy)
    """Ascending offsets at which runs are cut, on the source's side and on the destination's."""
    dst_edges: Int64Array = field(default_factory=_NO_EDGES.copy)
    given: Runs | None = None
    """The runs, where they were not derived from boxes."""

    @classmethod
    def of_runs(cls, src: Int64Array, dst: Int64Array, sizes: Int64Array) -> TransferPlan:
        """Runs as they are: a box for each size among them. Destinations must not overlap.

        Raises PlanError for columns that are not int64 of one length.
        """
        if not src.shape == dst.shape == sizes.shape == (len(sizes),):
            raise PlanError(f"columns of runs differ: {src.shape}, {dst.shape}, {sizes.shape}")
        if not src.dtype == dst.dtype == sizes.dtype == np.int64:
            raise PlanError(f"columns of runs: {src.dtype}, {dst.dtype}, {sizes.dtype}, not int64")
        boxes = []
        for size in np.unique(sizes).tolist():
            same = np.flatnonzero(sizes == size)
            same = same[np.argsort(dst[same], kind="stable")]
            boxes.append(Box(src[same], dst[same], (), (), (), size))
        return cls(tuple(boxes), given=Runs(src, dst, sizes))

    @cached_property
    def runs(self) -> Runs:
        """In the order of destination offsets, none across the edge of a region on either side,
        and no two that could be one."""
        if self.given is not None:
            return self.given
        runs = runs_of(self.boxes)
        runs = split(runs, runs.src_offsets, self.src_edges)
        return split(runs, runs.dst_offsets, self.dst_edges)

    @property
    def src_offsets(self) -> Int64Array:
        return self.runs.src_offsets

    @property
    def dst_offsets(self) -> Int64Array:
        return self.runs.dst_offsets

    @property
    def sizes(self) -> Int64Array:
        return self.runs.sizes

    @property
    def num_runs(self) -> int:
        return self.runs.num_runs

    @cached_property
    def total_bytes(self) -> int:
        return sum(box.total_bytes for box in self.boxes)


@dataclass(frozen=True)
class CacheSide:
    """One end of a transfer of one group: where its bytes lie, what is registered, and a stretch
    of the block table."""

    geometry: GroupGeometry
    regions: RegionSet
    """Of the whole cache."""
    blocks: Sequence[int]
    """Block ids of neighbouring entries in the order of the request's tokens."""
    first_entry: int = 0
    """Which entry of the table blocks[0] is: its first token is first_entry × block_size."""


def plan_groups(
    src: Sequence[CacheSide], dst: Sequence[CacheSide], tokens: Sequence[range]
) -> TransferPlan:
    """One plan for all groups, `tokens` group by group; errors as `plan_transfer`.

    Groups lie one behind the other on either side, so their runs follow in the order of offsets.
    """
    if not len(src) == len(dst) == len(tokens):
        raise PlanError(f"groups differ: source {len(src)}, destination {len(dst)}")
    parts = [plan_transfer(*one) for one in zip(src, dst, tokens, strict=True)]
    return TransferPlan(
        tuple(box for part in parts for box in part.boxes),
        np.concatenate([_NO_EDGES, *(part.src_edges for part in parts)]),
        np.concatenate([_NO_EDGES, *(part.dst_edges for part in parts)]),
    )


def plan_transfer(
    src: CacheSide, dst: CacheSide, tokens: range, layers: range | None = None
) -> TransferPlan:
    """Runs that copy the KV of `tokens` (positions in the request) in `layers` (default: all).

    Token t lies in entry t // block_size of the block table, at slot t % block_size. An empty
    range moves nothing. One group; `plan_groups` does all.

    Raises PlanError when the two specs differ, a range is not plain or leaves the layers or a
    block table, a block lies beyond its cache's capacity, or a destination block comes twice;
    RegionError when a byte lies outside the registered regions of its side.
    """
    spec = src.geometry.spec
    _check_specs(src.geometry, dst.geometry)
    layers = range(spec.num_layers) if layers is None else layers
    _check_range(layers, spec.num_layers, "layers", "layers of the cache")
    for side, name in ((src, "source"), (dst, "destination")):
        end = (side.first_entry + len(side.blocks)) * spec.block_size
        _check_range(tokens, end, "tokens", f"{name} block table")
        if tokens and tokens.start < side.first_entry * spec.block_size:
            raise PlanError(f"tokens: {tokens} begin before entry {side.first_entry} of the {name}")
    if not tokens or not layers:
        return TransferPlan(())
    pieces = list(_pieces(tokens, spec.block_size))
    src_end = _used_end(src, tokens, "source")
    dst_end = _used_end(dst, tokens, "destination")
    _check_unique(dst_end.blocks)
    src_edges = _edges(src_end, src.regions, pieces, layers, "source")
    dst_edges = _edges(dst_end, dst.regions, pieces, layers, "destination")
    boxes = tuple(_box(src_end, dst_end, piece, layers) for piece in pieces)
    return TransferPlan(boxes, src_edges, dst_edges)


def _check_specs(src: GroupGeometry, dst: GroupGeometry) -> None:
    for one in dataclasses.fields(src.spec):
        ours, theirs = getattr(src.spec, one.name), getattr(dst.spec, one.name)
        if ours != theirs:
            raise PlanError(f"{one.name} differs: source {ours!r}, destination {theirs!r}")


def _check_range(wanted: range, limit: int, name: str, container: str) -> None:
    if wanted.step != 1 or min(wanted.start, wanted.stop) < 0:
        raise PlanError(f"{name}: {wanted} must have step 1 and no negative bound")
    if wanted and wanted.stop > limit:
        raise PlanError(f"{name}: {wanted} leaves the {container}, which ends at {limit}")


@dataclass(frozen=True, slots=True)
class _End:
    """A side, narrowed to the blocks that the tokens touch."""

    geometry: GroupGeometry
    blocks: Int64Array

    @property
    def strides(self) -> dict[str, int]:
        return dict(zip(AXES, self.geometry.strides, strict=True))


def _used_end(side: CacheSide, tokens: range, name: str) -> _End:
    """`side` from the first touched table entry to the last; a wrong id would hit a byte of
    another segment, so ids are checked here and not by the regions."""
    spec, first = side.geometry.spec, side.first_entry
    entries = slice(tokens.start // spec.block_size - first, spec.num_blocks(tokens.stop) - first)
    blocks = np.asarray(side.blocks[entries], dtype=np.int64)
    capacity = side.geometry.capacity_blocks
    wrong = blocks[(blocks < 0) | (blocks >= capacity)]
    if len(wrong):
        raise PlanError(f"{name} block {wrong[0]} is not among the {capacity} of its cache")
    return _End(side.geometry, blocks)


def _check_unique(dst_blocks: Int64Array) -> None:
    found, counts = np.unique(dst_blocks, return_counts=True)
    if len(found) != len(dst_blocks):
        raise PlanError(f"destination block {found[np.argmax(counts)]} would be written twice")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring entries, counted from the first touched one, of which the same slots move."""

    entries: slice
    slots: range


def _pieces(tokens: range, block_size: int) -> Iterator[_Piece]:
    """At most three, none empty: a first block's tail, whole blocks, a last block's head."""
    skipped, head = divmod(tokens.start, block_size)
    last, tail = divmod(tokens.stop, block_size)
    first, last = 0, last - skipped
    if first == last:
        yield _Piece(slice(0, 1), range(head, tail))
        return
    if head:
        yield _Piece(slice(0, 1), range(head, block_size))
        first = 1
    if first < last:
        yield _Piece(slice(first, last), range(block_size))
    if tail:
        yield _Piece(slice(last, last + 1), range(tail))


def _edges(
    end: _End, regions: RegionSet, pieces: Sequence[_Piece], layers: range, name: str
) -> Int64Array:
    """Offsets at which a region starts inside a stretch that moves; often there are none.

    Looks at one end alone, whose stretches are as long as its layout allows: a whole page where
    the runs between two layouts may be one token of one head. Raises RegionError where a stretch
    is not covered.
    """
    stretches = runs_of([_box(end, end, piece, layers) for piece in pieces])
    offsets, sizes = stretches.dst_offsets, stretches.sizes
    parent, start, part = cut(offsets, sizes, regions.starts)
    regions.check_covers(offsets[parent] + start, part, name)
    inside = start > 0
    return np.unique(offsets[parent[inside]] + start[inside])


def _box(src: _End, dst: _End, piece: _Piece, layers: range) -> Box:
    """The runs of one piece, blind to regions."""
    spec = src.geometry.spec
    src_blocks, dst_blocks = src.blocks[piece.entries], dst.blocks[piece.entries]
    by_destination = np.argsort(dst_blocks)
    extents = {
        "L": len(layers),
        "H": spec.num_kv_heads,
        "N": len(piece.slots),
        "C": spec.content_dim,
    }
    inside, size = _common_run(src.strides, dst.strides, extents, spec.itemsize)
    outside = [axis for axis, extent in extents.items() if extent > 1 and axis not in inside]
    outside.sort(key=dst.strides.__getitem__, reverse=True)
    first = {"L": layers.start, "N": piece.slots.start}
    return Box(
        _starts(src, src_blocks[by_destination], first),
        _starts(dst, dst_blocks[by_destination], first),
        tuple(extents[axis] for axis in outside),
        tuple(src.strides[axis] for axis in outside),
        tuple(dst.strides[axis] for axis in outside),
        size,
    )


def _starts(end: _End, blocks: Int64Array, first: Mapping[str, int]) -> Int64Array:
    """Where the first byte that moves lies, block by block."""
    strides = end.strides
    base = end.geometry.offset + sum(index * strides[axis] for axis, index in first.items())
    return blocks * strides["B"] + base


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
