"""Prepared descriptor lists: every place where a run may lie, told to NIXL once.

A transfer whose runs have few sizes then names its descriptors by index, so NIXL neither checks nor
looks up what it has seen before. Knows nothing of NIXL: it is given what prepares and releases.

Facts, measured with nixl 1.5.1 on the host (2 cores, AMD Zen 3; microseconds):
- A strided row (address, size, device, stride, count) stands for `count` descriptors, numbered row
  by row. Preparing a list costs about 2 a row, whatever the counts, on either side.
- A row must lie within one registration, and its stride may not be less than its size.
- `initialize_xfer` with its descriptors costs 28 a thousand with 4 regions, 80 with 256, and from
  some 10,000 descriptors on 100 to 180; `make_prepped_xfer` 25 everywhere, and finding the indices
  of one side 7 a thousand and 20 more. In all, by rows and by lists:
  4,096 runs: 114 and 202 with 4 regions, 328 and 203 with 256; 16,384 runs: 2,270 and 670 with 4,
  3,040 and 670 with 256; 1,024 runs: 42 and 89 with 4, 87 and 88 with 256.
- An index beyond the list is refused. A list may be released while its peer or its memory is
  already forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.regions import Int64Array, RegionSet

MIN_RUNS = 1024
"""Fewer are not worth a list."""
MANY_RUNS = 8192
MANY_REGIONS = 32
MAX_SHAPES = 8
MAX_ROWS = 4096
"""Rows of one list: 8 ms to prepare."""
RUNS_PER_ROW = 20
"""From here on a list pays at its first use."""
MAX_LISTS = 32
"""Lists of one side; the one that was not used for longest goes first."""
_MAX_GRANULES = 1 << 20
_NOWHERE = np.int64(-(1 << 62))

Int32Array = NDArray[np.int32]
Shape = tuple[int, int]
"""(size, residue): runs of `size` bytes at offsets that leave `residue` when divided by it."""


@dataclass(frozen=True, slots=True)
class ShapedRuns:
    """One side's runs by shape: `places[i]` selects those of `shapes[i]`, which lie at
    `quotients[i]` × size + residue."""

    num_runs: int
    shapes: tuple[Shape, ...]
    places: tuple[Any, ...]
    quotients: tuple[Int64Array, ...]


def lists_pay(num_runs: int, num_regions: int) -> bool:
    """Whether finding indices costs less than what it saves (see above). Pure."""
    return num_runs >= MANY_RUNS or (num_runs >= MIN_RUNS and num_regions >= MANY_REGIONS)


def sort_by_shape(offsets: Int64Array, sizes: Int64Array) -> ShapedRuns | None:
    """At least one run. None where their shapes are too many for a list. Sizes are positive."""
    found: list[tuple[Shape, Any, Int64Array]] = []
    for size, of_size in _groups(sizes):
        quotients, residues = np.divmod(offsets[of_size], size)
        for residue, of_residue in _groups(residues):
            if len(found) == MAX_SHAPES:
                return None
            place = of_residue if isinstance(of_size, slice) else of_size[of_residue]
            found.append(((size, residue), place, quotients[of_residue]))
    shapes, places, parts = zip(*found, strict=True)
    return ShapedRuns(len(sizes), shapes, places, parts)


def _groups(values: Int64Array) -> list[tuple[int, Any]]:
    """(value, where it is), one more than MAX_SHAPES at the most. All alike is the usual case."""
    if (values == values[0]).all():
        return [(int(values[0]), slice(None))]
    distinct = np.unique(values)[: MAX_SHAPES + 1].tolist()
    return [(value, np.flatnonzero(values == value)) for value in distinct]


@dataclass(slots=True, eq=False)
class UnitList:
    """A prepared list of all places of some shapes within some regions."""

    handle: Any
    regions: RegionSet
    granule: int
    shifts: tuple[Int64Array, ...]
    """By shape, then by granule of the window: what turns a quotient into an index."""
    users: int = 0
    """Transfers under way that were made of it."""
    is_retired: bool = False

    def indices(self, runs: ShapedRuns, offsets: Int64Array) -> Int32Array | None:
        """Of every run; None where one lies in a region that the list does not know."""
        granules = offsets // self.granule
        if len(granules) and int(granules.max()) >= len(self.shifts[0]):
            return None
        found = np.empty(runs.num_runs, dtype=np.int64)
        for shift, place, quotients in zip(self.shifts, runs.places, runs.quotients, strict=True):
            found[place] = quotients + shift[granules[place]]
        return None if int(found.min()) < 0 else found.astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some descriptors of a prepared list."""

    units: UnitList
    indices: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """What a list of `shapes` within `regions` holds."""

    rows: Int64Array
    """[R, 4]: (offset, size, stride, count)."""
    granule: int
    shifts: tuple[Int64Array, ...]

    @classmethod
    def build(cls, shapes: tuple[Shape, ...], regions: RegionSet) -> _Table | None:
        """None where the regions are too many, or too crooked for a table of granules."""
        starts, ends = regions.starts, regions.ends
        granule = math.gcd(*starts.tolist(), *ends.tolist())
        if not len(starts) or ends[-1] // granule > _MAX_GRANULES:
            return None
        rows = np.empty((len(starts), len(shapes), 4), dtype=np.int64)
        firsts = np.empty((len(starts), len(shapes)), dtype=np.int64)
        for index, (size, residue) in enumerate(shapes):
            firsts[:, index] = -((residue - starts) // size)  # rounded up
            rows[:, index, 0] = firsts[:, index] * size + residue
            rows[:, index, 1:3] = size
            rows[:, index, 3] = np.maximum((ends - residue) // size - firsts[:, index], 0)
        counts = rows[:, :, 3].ravel()
        before = np.cumsum(counts) - counts
        if not 0 < counts.sum() < 1 << 31 or np.count_nonzero(counts) > MAX_ROWS:
            return None
        where = np.repeat(np.arange(len(starts)), (ends - starts) // granule)
        granules = np.arange(len(where)) + _gaps(starts, ends, granule)[where]
        shift = before.reshape(firsts.shape) - firsts
        shifts = []
        for index in range(len(shapes)):
            table = np.full(ends[-1] // granule, _NOWHERE)
            table[granules] = shift[where, index]
            shifts.append(table)
        flat = rows.reshape(-1, 4)
        return cls(flat[flat[:, 3] > 0], granule, tuple(shifts))


def _gaps(starts: Int64Array, ends: Int64Array, granule: int) -> Int64Array:
    """By region, the granules before it that belong to none."""
    sizes = ends - starts
    gaps: Int64Array = (starts - (np.cumsum(sizes) - sizes)) // granule
    return gaps


@dataclass(slots=True, eq=False)
class _Side:
    """The memory of one agent, and what is prepared of it."""

    regions: RegionSet
    prepare: Callable[[Int64Array], Any]
    lists: OrderedDict[tuple[Shape, ...], UnitList | None] = field(default_factory=OrderedDict)
    """None: the shapes were seen, but nothing is prepared yet. The last used stands last."""


class ListCache:
    """Owns the prepared lists of one agent: of its own memory and of each peer's."""

    def __init__(self, release: Callable[[Any], None]) -> None:
        """`release` gives a prepared list back."""
        self._release = release
        self._sides: dict[str, _Side] = {}

    def know(self, name: str, regions: RegionSet, prepare: Callable[[Int64Array], Any]) -> None:
        """The memory of `name` is just `regions` now. `prepare` makes a handle of rows (offset,
        size, stride, count), [R, 4], of which none leaves a region."""
        side = self._sides.get(name)
        if side is None:
            self._sides[name] = _Side(regions, prepare)
        elif side.regions is not regions:
            if not set(side.regions.regions) <= set(regions.regions):
                self._retire_all(side)
            side.regions, side.prepare = regions, prepare

    def forget(self, name: str) -> None:
        """Its lists go, as soon as no transfer uses them."""
        side = self._sides.pop(name, None)
        if side is not None:
            self._retire_all(side)

    def take(self, name: str, offsets: Int64Array, sizes: Int64Array) -> Selection | None:
        """A list of the memory of `name`, which is known, and the indices of runs within its
        regions; None where a list does not pay. Each is given back by `give_back`."""
        runs = sort_by_shape(offsets, sizes)
        if runs is None:
            return None
        side = self._sides[name]
        seen = runs.shapes in side.lists
        known = side.lists.pop(runs.shapes, None)
        side.lists[runs.shapes] = known
        if len(side.lists) > MAX_LISTS:
            self._retire(side.lists.popitem(last=False)[1])
        found = known.indices(runs, offsets) if known is not None else None
        if found is None:
            known = self._replace(side, runs.shapes, math.inf if seen else runs.num_runs)
            found = known.indices(runs, offsets) if known is not None else None
        if known is None or found is None:
            return None
        known.users += 1
        return Selection(known, found)

    def give_back(self, used: UnitList) -> None:
        """A transfer that was made of `used` has ended."""
        used.users -= 1
        self._drop(used)

    def refresh(self) -> None:
        """Prepare one list anew that lags behind what is known of its memory, if there is one."""
        for side in self._sides.values():
            for shapes, known in reversed(side.lists.items()):
                if known is not None and known.regions is not side.regions:
                    self._replace(side, shapes, math.inf)
                    return

    def _replace(self, side: _Side, shapes: tuple[Shape, ...], num_runs: float) -> UnitList | None:
        """A list of all of the side, in the place of what it had; None where it has too many rows
        for transfers of `num_runs`."""
        old, side.lists[shapes] = side.lists[shapes], None
        self._retire(old)
        table = _Table.build(shapes, side.regions)
        if table is None or len(table.rows) * RUNS_PER_ROW > num_runs:
            return None
        made = UnitList(side.prepare(table.rows), side.regions, table.granule, table.shifts)
        side.lists[shapes] = made
        return made

    def _retire_all(self, side: _Side) -> None:
        for known in side.lists.values():
            self._retire(known)
        side.lists.clear()

    def _retire(self, known: UnitList | None) -> None:
        if known is not None:
            known.is_retired = True
            self._drop(known)

    def _drop(self, known: UnitList) -> None:
        if known.is_retired and not known.users:
            self._release(known.handle)
