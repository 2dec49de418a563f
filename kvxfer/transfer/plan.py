"""From two cache geometries and two block tables to the bytes that must move. Pure numpy.

The two sides may differ in layout, in block size, where one divides the other, and in the KV heads
that they hold, as ranks of different tensor-parallel sizes do. All else of a group is the same.

Facts that this file relies on, checked by the tests against moving every element by itself:
- A destination byte is written once, so of all runs at most one starts where another ends: in the
  order of destination offsets, joining neighbours finds every join that there is.
- Regions are disjoint, so cutting where one starts is enough: a run that reaches past the end of
  one where no other starts touches unregistered bytes, and the coverage check refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvxfer.cache.layout import GroupGeometry
from kvxfer.errors import PlanError
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.coverage import crossed_edges
from kvxfer.transfer.ends import End, Piece, Recipe, pieces, stretches_of
from kvxfer.transfer.regions import Int64Array, RegionSet
from kvxfer.transfer.runs import Runs, runs_of, split

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
    seen: tuple[RegionSet, RegionSet] | None = None
    """The registered regions, source's and destination's, that the planner found all of it in."""
    recipes: tuple[Recipe | None, ...] = ()
    """Group by group, of a planner's plan; None where nothing moves."""

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

    def of_layers(self, layers: Sequence[range]) -> TransferPlan:
        """The part of a planner's plan that moves `layers`, group by group, of those planned for.
        What was checked for all of it holds for each part. Raises PlanError for other layers."""
        if len(layers) != len(self.recipes):
            raise PlanError(f"layers of {len(layers)} groups, the plan has {len(self.recipes)}")
        if all(
            recipe and some == recipe.pieces[0].layers
            for recipe, some in zip(self.recipes, layers, strict=True)
        ):
            return self
        boxes: list[Box] = []
        for recipe, some in zip(self.recipes, layers, strict=True):
            if recipe is not None:
                _check_range(some, recipe.pieces[0].layers, "layers", "layers of the plan")
                boxes += recipe.boxes(some)
        return TransferPlan(tuple(boxes), self.src_edges, self.dst_edges, seen=self.seen)

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
    """Of this shard: its num_kv_heads are those that the shard holds."""
    regions: RegionSet
    """Of the whole cache."""
    blocks: Sequence[int]
    """Block ids of neighbouring entries in the order of the request's tokens."""
    first_entry: int = 0
    """Which entry of the table blocks[0] is: its first token is first_entry × block_size, in
    blocks of this side's size."""
    first_head: int = 0
    """Which KV head of the model the geometry's head 0 is."""
    heads: range | None = None
    """The heads, in the model's numbers, that take part; default: all that the shard holds."""

    @property
    def held_heads(self) -> range:
        """In the model's numbers."""
        return range(self.first_head, self.first_head + self.geometry.spec.num_kv_heads)


def plan_groups(
    src: Sequence[CacheSide],
    dst: Sequence[CacheSide],
    tokens: Sequence[range],
    layers: Sequence[range | None] | None = None,
) -> TransferPlan:
    """One plan for all groups, `tokens` and `layers` group by group; errors as `plan_transfer`.

    Groups lie one behind the other on either side, so their runs follow in the order of offsets.
    """
    layers = [None] * len(src) if layers is None else layers
    if not len(src) == len(dst) == len(tokens) == len(layers):
        raise PlanError(f"groups differ: source {len(src)}, destination {len(dst)}")
    parts = [plan_transfer(*one) for one in zip(src, dst, tokens, layers, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return TransferPlan(
        tuple(box for part in parts for box in part.boxes),
        np.concatenate([_NO_EDGES, *(part.src_edges for part in parts)]),
        np.concatenate([_NO_EDGES, *(part.dst_edges for part in parts)]),
        seen=(src[0].regions, dst[0].regions) if src else None,
        recipes=tuple(recipe for part in parts for recipe in part.recipes),
    )


def plan_transfer(
    src: CacheSide, dst: CacheSide, tokens: range, layers: range | None = None
) -> TransferPlan:
    """Runs that copy the KV of `tokens` (positions in the request) in `layers` (default: all), of
    the heads that take part on both sides: nothing where they have none in common.

    Token t lies in entry t // block_size of each side's own block table, at slot t % block_size.
    An empty range moves nothing. One group; `plan_groups` does all.

    Raises PlanError when the two specs differ in more than may be, a range is not plain or leaves
    the layers, the heads or a block table, a block lies beyond its cache's capacity, or a
    destination block comes twice; RegionError when a byte lies outside the registered regions of
    its side.
    """
    if src.geometry.spec != dst.geometry.spec:
        _check_specs(src.geometry, dst.geometry)
    num_layers = src.geometry.spec.num_layers
    layers = range(num_layers) if layers is None else layers
    _check_range(layers, range(num_layers), "layers", "layers of the cache")
    for side, name in ((src, "source"), (dst, "destination")):
        _check_tokens(side, tokens, name)
    heads = _common_heads(src, dst)
    if not tokens or not layers or not heads:
        return TransferPlan((), recipes=(None,))
    src_end = _used_end(src, tokens, "source")
    dst_end = _used_end(dst, tokens, "destination")
    _check_unique(dst_end.blocks)
    sizes = src.geometry.spec.block_size, dst.geometry.spec.block_size
    parts = pieces(tokens, (min(sizes), sizes[1]), layers, heads)
    recipe = Recipe(src_end, dst_end, tuple(parts))
    return TransferPlan(
        recipe.boxes(layers),
        _edges(src_end, src.regions, tokens, parts[0], "source"),
        _edges(dst_end, dst.regions, tokens, parts[0], "destination"),
        seen=(src.regions, dst.regions),
        recipes=(recipe,),
    )


def _check_specs(src: GroupGeometry, dst: GroupGeometry) -> None:
    for one in dataclasses.fields(src.spec):
        ours, theirs = getattr(src.spec, one.name), getattr(dst.spec, one.name)
        if ours == theirs or one.name in ("num_kv_heads", "replicas"):
            continue
        if one.name != "block_size":
            raise PlanError(f"{one.name} differs: source {ours!r}, destination {theirs!r}")
        if max(ours, theirs) % min(ours, theirs):
            raise PlanError(
                f"block_size differs: source {ours}, destination {theirs}, and neither is a "
                f"multiple of the other"
            )


def _check_range(wanted: range, limits: range, name: str, container: str) -> None:
    if wanted.step != 1 or min(wanted.start, wanted.stop) < 0:
        raise PlanError(f"{name}: {wanted} must have step 1 and no negative bound")
    if wanted and wanted.stop > limits.stop:
        raise PlanError(f"{name}: {wanted} leaves the {container}, which ends at {limits.stop}")
    if wanted and wanted.start < limits.start:
        raise PlanError(f"{name}: {wanted} leaves the {container}, which begins at {limits.start}")


def _check_tokens(side: CacheSide, tokens: range, name: str) -> None:
    size = side.geometry.spec.block_size
    end = side.first_entry + len(side.blocks)
    held = range(side.first_entry * size, end * size)
    _check_range(tokens, held, "tokens", f"{name} block table")


def _common_heads(src: CacheSide, dst: CacheSide) -> range:
    """The heads that move, in the model's numbers."""
    taking_part = []
    for side, name in ((src, "source"), (dst, "destination")):
        if side.first_head < 0:
            raise PlanError(f"first_head: {side.first_head} of the {name} is negative")
        heads = side.held_heads if side.heads is None else side.heads
        _check_range(heads, side.held_heads, "heads", f"shard of the {name}")
        taking_part.append(heads)
    ours, theirs = taking_part
    start = max(ours.start, theirs.start)
    return range(start, max(start, min(ours.stop, theirs.stop)))


def _used_end(side: CacheSide, tokens: range, name: str) -> End:
    """`side` from the first touched table entry to the last; a wrong id would hit a byte of
    another segment, so ids are checked here and not by the regions."""
    spec = side.geometry.spec
    first = tokens.start // spec.block_size
    entries = slice(first - side.first_entry, spec.num_blocks(tokens.stop) - side.first_entry)
    blocks, capacity = side.blocks[entries], side.geometry.capacity_blocks
    lowest, highest = min(blocks), max(blocks)
    if lowest < 0 or highest >= capacity:
        wrong = next(block for block in blocks if not 0 <= block < capacity)
        raise PlanError(f"{name} block {wrong} is not among the {capacity} of its cache")
    ids = np.array(blocks, dtype=np.int64)
    return End(side.geometry, ids, first, side.first_head, lowest, highest)


def _check_unique(dst_blocks: Int64Array) -> None:
    if len(set(dst_blocks.tolist())) != len(dst_blocks):
        found, counts = np.unique(dst_blocks, return_counts=True)
        raise PlanError(f"destination block {found[np.argmax(counts)]} would be written twice")


def _edges(end: End, regions: RegionSet, tokens: range, part: Piece, name: str) -> Int64Array:
    """Offsets at which runs are cut for one side, looked at alone: in its own blocks, whose
    stretches are as long as its layout allows. Raises RegionError.

    Of block 0 also the group's first byte, where the group in front may end: a region starts there.
    """
    if regions.whole_blocks(end.geometry).has(end.lowest, end.highest):
        return _NO_EDGES
    size = end.geometry.spec.block_size
    own = pieces(tokens, (size, size), part.layers, part.heads)
    found = crossed_edges([stretches_of(end, piece) for piece in own], regions, name)
    return np.insert(found, 0, end.geometry.offset) if end.lowest == 0 else found
