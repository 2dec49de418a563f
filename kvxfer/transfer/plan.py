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
from dataclasses import dataclass

import numpy as np

from kvxfer.cache.layout import AXES, GroupGeometry
from kvxfer.errors import PlanError
from kvxfer.transfer.regions import Int64Array, RegionSet


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Runs of bytes: sizes[i] bytes from src_offsets[i] to dst_offsets[i], int64, base-relative.

    No run crosses the edge of a region on either side. Destinations ascend and never overlap;
    sources may repeat. No two runs could be one.
    """

    src_offsets: Int64Array
    dst_offsets: Int64Array
    sizes: Int64Array

    @property
    def num_runs(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())


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
    return _concatenate([part for part in parts if part.num_runs])


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
        return _concatenate([])
    pieces = list(_pieces(tokens, spec.block_size))
    src_end = _used_end(src, tokens, "source")
    dst_end = _used_end(dst, tokens, "destination")
    _check_unique(dst_end.blocks)
    src_cuts = _cuts(src_end, src.regions, pieces, layers, "source")
    dst_cuts = _cuts(dst_end, dst.regions, pieces, layers, "destination")
    runs = _runs(src_end, dst_end, pieces, layers)
    runs = _split(runs, runs.src_offsets, src_cuts)
    return _split(runs, runs.dst_offsets, dst_cuts)


def _check_specs(src: GroupGeometry, dst: GroupGeometry) -> None:
    for field in dataclasses.fields(src.spec):
        ours, theirs = getattr(src.spec, field.name), getattr(dst.spec, field.name)
        if ours != theirs:
            raise PlanError(f"{field.name} differs: source {ours!r}, destination {theirs!r}")


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


def _cuts(
    end: _End, regions: RegionSet, pieces: Sequence[_Piece], layers: range, name: str
) -> Int64Array:
    """Offsets at which a region starts inside a stretch that moves; often there are none.

    Looks at one end alone, whose stretches are as long as its layout allows: a whole page where
    the runs between two layouts may be one token of one head. Raises RegionError where a stretch
    is not covered.
    """
    stretches = _runs(end, end, pieces, layers)
    offsets, sizes = stretches.dst_offsets, stretches.sizes
    parent, start, part = _cut(offsets, sizes, regions.starts)
    regions.check_covers(offsets[parent] + start, part, name)
    inside = start > 0
    return np.unique(offsets[parent[inside]] + start[inside])


def _runs(src: _End, dst: _End, pieces: Sequence[_Piece], layers: range) -> TransferPlan:
    """The longest runs there are, blind to regions."""
    return _coalesce(_concatenate([_enumerate(src, dst, piece, layers) for piece in pieces]))


def _enumerate(src: _End, dst: _End, piece: _Piece, layers: range) -> TransferPlan:
    """The runs of one piece, equal in size, in the order of destination offsets."""
    spec = src.geometry.spec
    src_blocks, dst_blocks = src.blocks[piece.entries], dst.blocks[piece.entries]
    by_destination = np.argsort(dst_blocks)
    indices = {
        "L": np.arange(layers.start, layers.stop),
        "H": np.arange(spec.num_kv_heads),
        "N": np.arange(piece.slots.start, piece.slots.stop),
        "C": np.arange(spec.content_dim),
    }
    extents = {axis: len(along) for axis, along in indices.items()}
    inside, size = _common_run(src.strides, dst.strides, extents, spec.itemsize)
    for axis in inside:
        indices[axis] = indices[axis][:1]
    order = sorted(AXES, key=dst.strides.__getitem__, reverse=True)
    src_offsets = _offsets(src, order, {**indices, "B": src_blocks[by_destination]})
    dst_offsets = _offsets(dst, order, {**indices, "B": dst_blocks[by_destination]})
    return TransferPlan(src_offsets, dst_offsets, np.full(len(dst_offsets), size, np.int64))


def _common_run(
    src: Mapping[str, int], dst: Mapping[str, int], extents: Mapping[str, int], itemsize: int
) -> tuple[list[str], int]:
    """The axes inside the longest run that is contiguous on both sides, and its bytes.

    B is not among them: block ids are arbitrary, and where they are not, `_coalesce` sees it.
    """
    size = itemsize
    inside: list[str] = []
    outside = [axis for axis, extent in extents.items() if extent > 1]
    while (axis := next((a for a in outside if src[a] == dst[a] == size), None)) is not None:
        size *= extents[axis]
        inside.append(axis)
        outside.remove(axis)
    return inside, size


def _offsets(end: _End, order: Sequence[str], indices: Mapping[str, Int64Array]) -> Int64Array:
    """The group's offset and index × stride summed over the axes, for every combination, last axis
    of `order` fastest."""
    strides = end.strides
    found = np.full(1, end.geometry.offset, dtype=np.int64)
    for axis in order:
        found = np.add.outer(found, indices[axis] * strides[axis]).ravel()
    return found


def _concatenate(parts: Sequence[TransferPlan]) -> TransferPlan:
    """All runs in the order of destination offsets; each part has it already."""
    if len(parts) == 1:
        return parts[0]
    empty = np.zeros(0, dtype=np.int64)
    src = np.concatenate([empty, *(part.src_offsets for part in parts)])
    dst = np.concatenate([empty, *(part.dst_offsets for part in parts)])
    sizes = np.concatenate([empty, *(part.sizes for part in parts)])
    order = np.argsort(dst, kind="stable")  # merges ascending stretches: near linear here
    return TransferPlan(src[order], dst[order], sizes[order])


def _coalesce(runs: TransferPlan) -> TransferPlan:
    """One run of each row of neighbours that adjoin on both sides."""
    src, dst, sizes = runs.src_offsets, runs.dst_offsets, runs.sizes
    starts = np.ones(runs.num_runs, dtype=np.bool_)
    starts[1:] = (src[:-1] + sizes[:-1] != src[1:]) | (dst[:-1] + sizes[:-1] != dst[1:])
    if starts.all():
        return runs
    first = np.flatnonzero(starts)
    return TransferPlan(src[first], dst[first], np.add.reduceat(sizes, first))


def _split(runs: TransferPlan, offsets: Int64Array, edges: Int64Array) -> TransferPlan:
    """The runs, which lie at `offsets` on one side, cut at the `edges` of that side."""
    if not len(edges):
        return runs
    parent, start, sizes = _cut(offsets, runs.sizes, edges)
    return TransferPlan(runs.src_offsets[parent] + start, runs.dst_offsets[parent] + start, sizes)


def _cut(
    offsets: Int64Array, sizes: Int64Array, edges: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut each [offset, offset + size) at the ascending `edges` strictly inside it.

    Returns, part by part: the index of what it is a part of, where it starts in that, its size.
    """
    after = np.searchsorted(edges, offsets, side="right")
    until = np.searchsorted(edges, offsets + sizes, side="left")
    if np.array_equal(after, until):  # the usual case, and most of the time is saved here
        return np.arange(len(offsets)), np.zeros_like(offsets), sizes
    num_parts = until - after + 1
    parent = np.repeat(np.arange(len(offsets)), num_parts)
    rank = np.arange(len(parent)) - (np.cumsum(num_parts) - num_parts)[parent]
    ends_at_edge = np.flatnonzero(rank + 1 < num_parts[parent])
    owner = parent[ends_at_edge]
    stop = sizes[parent]
    stop[ends_at_edge] = edges[after[owner] + rank[ends_at_edge]] - offsets[owner]
    start = np.zeros_like(stop)
    start[ends_at_edge + 1] = stop[ends_at_edge]
    return parent, start, stop - start
