"""What `kvxfer bench beside` and its two processes say to each other. Plain values, pickled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvxfer.cache.layout import CacheGeometry
from kvxfer.transfer.lanes import LaneSide
from kvxfer.transfer.regions import RegionSet


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine and its load; of both processes, each of which uses its part."""

    model: Path
    kv_bytes: int
    block_size: int
    layout: str
    connector: str
    lane: str
    threads: int
    chunk_tokens: int
    """Of one prefill chunk, and of what moves in the background for one."""
    kv_stream_bytes: int
    sequences: int
    """That decode at once."""
    context_tokens: int
    """Of each, when a phase begins."""
    cycle_tokens: int
    """That each decodes before it begins again."""
    sets: int
    """Chunks whose KV moves in the background, in turn."""
    in_flight: int
    """Transfers under way at once, at the most."""


@dataclass(frozen=True, slots=True)
class EngineContact:
    """An engine, as its peer needs to know it."""

    base_address: int
    geometry: CacheGeometry
    regions: RegionSet
    description: bytes
    invitation: bytes
    side: LaneSide
    background: tuple[tuple[int, ...], ...]
    """Blocks of each set."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time in which both compute; samples count within `window`."""

    start_s: float
    """CLOCK_MONOTONIC, as all below."""
    settle_s: float
    """Before samples count, and after."""
    seconds: float
    gbps: float | None
    """KV moves at this pace in the background; None: as fast as it can; 0: not at all."""

    @property
    def window(self) -> tuple[float, float]:
        begin = self.start_s + self.settle_s
        return begin, begin + self.seconds

    @property
    def end_s(self) -> float:
        return self.window[1] + self.settle_s


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process saw in a phase."""

    gaps_ms: tuple[float, ...]
    """From one result to the next: between a batch's tokens, or of a prefill chunk."""
    outputs: tuple[tuple[int, ...], ...]
    """Of each step from the phase's beginning on: the tokens that it chose."""
    moved_gbps: float
    """KV that arrived, where this process moved it."""

    @property
    def p99_ms(self) -> float:
        if len(self.gaps_ms) == 1:
            return self.gaps_ms[0]
        return statistics.quantiles(self.gaps_ms, n=100, method="inclusive")[98]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.gaps_ms)

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.gaps_ms)


def gaps_within(ends_s: Sequence[float], window: tuple[float, float]) -> tuple[float, ...]:
    """Milliseconds between neighbours of `ends_s` (ascending) that both lie in `window`."""
    inside = [end for end in ends_s if window[0] <= end <= window[1]]
    return tuple(1e3 * (b - a) for a, b in pairwise(inside))


def differing(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    """Steps, of those that both took, that did not choose the same tokens."""
    return sum(a != b for a, b in zip(outputs, reference, strict=False))
