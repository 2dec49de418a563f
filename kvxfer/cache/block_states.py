"""The state of each block of one group as numbers, and runs of them: for pictures of a cache.

A cache may have 100,000 blocks: everything here is done by numpy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.uint8]


class BlockState(enum.IntEnum):
    """Where one place stands for several blocks the highest of them is what it shows."""

    NULL = 0
    FREE = 1
    CACHED = 2
    """Held by nobody, kept for what is in it."""
    USED = 3
    QUARANTINED = 4
    """Held only since a peer may still touch it."""
    IN_FLIGHT = 5
    """Used, and read or written by a transfer, or by a peer under a grant or lease."""


def mark(states: States, blocks: Iterable[int], state: BlockState, only: BlockState) -> None:
    """Those of `blocks` that are in state `only` are in `state` from now on. Blocks at or above
    the bound are passed over."""
    ids = np.fromiter(blocks, np.int64)
    ids = ids[ids < len(states)]
    states[ids[states[ids] == only]] = state


def counts(states: States) -> list[int]:
    """Blocks in each state, in the order of BlockState."""
    found: list[int] = np.bincount(states, minlength=len(BlockState)).tolist()
    return found


def runs(states: States, most: int) -> tuple[int, list[tuple[int, int]]]:
    """(blocks in a cell, [(state, cells), ...]): at most `most` runs of cells, whose size is the
    smallest power of two that allows it."""
    scale = 1
    while True:
        edges = np.flatnonzero(np.diff(states)) + 1
        if len(edges) < most:
            starts = np.concatenate(([0], edges, [len(states)]))
            found = zip(states[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True)
            return scale, list(found)
        states = np.maximum.reduceat(states, np.arange(0, len(states), 2))
        scale *= 2
