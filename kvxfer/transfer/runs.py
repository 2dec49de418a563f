"""Runs of bytes as columns of numpy arrays: put together, joined and cut. Pure.

A destination byte is written once, so of all runs at most one starts where another ends: in the
order of destination offsets, joining neighbours finds every join that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.transfer.boxes import Box
from kvxfer.transfer.regions import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """sizes[i] bytes from src_offsets[i] to dst_offsets[i], int64, base-relative."""

    src_offsets: Int64Array
    dst_offsets: Int64Array
    sizes: Int64Array

    @property
    def num_runs(self) -> int:
        return len(self.sizes)


def runs_of(boxes: Sequence[Box]) -> Runs:
    """All runs of `boxes` in the order of destination offsets, as long as they can be."""
    parts = []
    for box in boxes:
        dst = box.dst_offsets()
        parts.append(Runs(box.src_offsets(), dst, np.full(len(dst), box.run_bytes, np.int64)))
    return coalesce(concatenate(parts))


def concatenate(parts: Sequence[Runs]) -> Runs:
    """All runs in the order of destination offsets."""
    empty = np.zeros(0, dtype=np.int64)
    src = np.concatenate([empty, *(part.src_offsets for part in parts)])
    dst = np.concatenate([empty, *(part.dst_offsets for part in parts)])
    sizes = np.concatenate([empty, *(part.sizes for part in parts)])
    order = np.argsort(dst, kind="stable")  # merges ascending stretches: near linear here
    return Runs(src[order], dst[order], sizes[order])


def coalesce(runs: Runs) -> Runs:
    """One run of each row of neighbours that adjoin on both sides."""
    src, dst, sizes = runs.src_offsets, runs.dst_offsets, runs.sizes
    starts = np.ones(runs.num_runs, dtype=np.bool_)
    starts[1:] = (src[:-1] + sizes[:-1] != src[1:]) | (dst[:-1] + sizes[:-1] != dst[1:])
    if starts.all():
        return runs
    first = np.flatnonzero(starts)
    return Runs(src[first], dst[first], np.add.reduceat(sizes, first))


def split(runs: Runs, offsets: Int64Array, edges: Int64Array) -> Runs:
    """The runs, which lie at `offsets` on one side, cut at the ascending `edges` of that side."""
    if not len(edges):
        return runs
    parent, start, sizes = cut(offsets, runs.sizes, edges)
    return Runs(runs.src_offsets[parent] + start, runs.dst_offsets[parent] + start, sizes)


def cut(
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
