"""Whether what a peer asks for is registered here, told quickly for piece after piece. Pure numpy.

The pieces of a transfer differ in their starts alone. So of each shape it is remembered between
which starts everything is registered: then a piece costs two comparisons.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from connectors.staging_plan import Nest
from kvxfer.transfer.boxes import spread
from kvxfer.transfer.regions import Int64Array, RegionSet

MAX_SHAPES: Final = 64
"""That are remembered."""
MAX_RUNS: Final = 1 << 14
"""Of one start; nests of more are for who looks more closely."""

Shape = tuple[tuple[int, ...], tuple[int, ...], int]


class Cover:
    """What lies in `regions`, which do not change."""

    def __init__(self, regions: RegionSet) -> None:
        self.regions = regions
        apart = np.flatnonzero(regions.starts[1:] != regions.ends[:-1])
        self._starts = regions.starts[np.concatenate([[0], apart + 1])] if regions.regions else None
        self._ends = regions.ends[np.concatenate([apart, [-1]])] if regions.regions else None
        self._known: dict[Shape, tuple[int, int]] = {}
        """The first and the last start that all of a shape may have, those between included."""

    def holds(self, nest: Nest) -> bool:
        """Whether each of its bytes is registered. False may mean that this is not known: where
        the starts lie on both sides of a gap, or the runs are very many."""
        lowest, highest = nest.bounds()
        shape = nest.extents, nest.strides, nest.run_bytes
        known = self._known.get(shape)
        if known is not None and known[0] <= lowest and highest <= known[1]:
            return True
        if math.prod(nest.extents) > MAX_RUNS:
            return False
        found = self._around(nest, lowest, highest)
        if found is None:
            return False
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        self._known[shape] = found
        return True

    def _around(self, nest: Nest, lowest: int, highest: int) -> tuple[int, int] | None:
        """The widest stretch of starts around [lowest, highest] all of whose runs lie in regions,
        each run in one stretch of adjoining ones; None where there is none."""
        if self._starts is None or self._ends is None:
            return None
        origins: Int64Array = spread(np.zeros(1, dtype=np.int64), nest.extents, nest.strides)
        where = np.searchsorted(self._starts, lowest + origins, side="right") - 1
        first = self._starts[where] - origins
        last = self._ends[where] - origins - nest.run_bytes
        if where.min() < 0 or int(last.min()) < highest:
            return None
        return int(first.max()), int(last.min())
