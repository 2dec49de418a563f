"""Transfers while the source's cache grows: how much longer they take.

The target pulls without a pause. Amid that the source extends its cache, registers and describes
what is new; the target learns it and pulls a block of it beside the others. From the start of the
extension until that block has arrived is the growth; a transfer that has a moment in common with
it overlaps it. Each growth is of memory that was never there before, in one cache that only grows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvxfer.bench.report import Figure
from kvxfer.bench.transfer import TransferOptions
from kvxfer.bench.transfer_pair import Pair
from kvxfer.bench.transfer_rounds import Work, check_arrived, write_sources
from kvxfer.bench.transfer_shapes import (
    GIB,
    Shape,
    blocks_for,
    capacity_for,
    random_places,
    shape_of,
)
from kvxfer.bench.transfer_words import Burst, CacheSetup, Grown, Move
from kvxfer.errors import TransferError
from kvxfer.transfer.connector import Direction

BAR = 1.3
RING = 16
"""Sets of target blocks that the transfers of a burst take in turn; each is checked after it."""
PROBE_BLOCK = 1
"""Of the target, for the new block."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the transfers of some bursts."""

    overlapping: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    growths: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of the 95th percentiles."""
        return percentile(self.overlapping, 95) / percentile(self.others, 95)


def growth_overlap(
    connector: str, devices: tuple[str, str], options: TransferOptions, size_bytes: int
) -> Iterator[Figure]:
    """`options.runs` growths, after one that is not counted. Raises KvxferError, TransferError too
    where a byte is wrong, or where no transfer overlapped a growth."""
    is_host = devices == ("cpu", "cpu")
    gib = options.host_growth_gib if is_host else options.growth_gib
    shape = shape_of(64)
    num_blocks = blocks_for(shape.spec, size_bytes)
    step = blocks_for(shape.spec, int(gib * GIB))
    first = capacity_for(num_blocks)
    ring = min(RING, options.growth_transfers)
    works = _works(num_blocks, ring)
    counts = (options.growth_transfers, options.growth_transfers)
    bursts = []
    with Pair(*devices) as pair:
        source = CacheSetup((shape,), (first + (1 + options.runs) * step,), (first,))
        pair.open(connector, source, _target(shape, num_blocks, ring))
        write_sources(pair, works[:1])
        for index in range(1, options.runs + 2):
            burst = _burst(pair, works, counts, first + index * step)
            if index > 1:
                bursts.append(times_of(*burst))
    gib_text = f"{connector}, growth of {gib:g} GiB"
    yield from _figures(gib_text, bursts, None if is_host else BAR)


def _target(shape: Shape, num_blocks: int, ring: int) -> CacheSetup:
    return CacheSetup.of(shape, capacity=PROBE_BLOCK + 1 + ring * num_blocks)


def _works(num_blocks: int, ring: int) -> list[Work]:
    """The same blocks of the source, to other blocks of the target each."""
    src = random_places(num_blocks, range(1, capacity_for(num_blocks)), seed=1)
    places = random_places(
        ring * num_blocks, range(PROBE_BLOCK + 1, PROBE_BLOCK + 1 + ring * num_blocks), seed=2
    )
    starts = range(0, ring * num_blocks, num_blocks)
    sets = [places[start : start + num_blocks] for start in starts]
    return [Work("growth", Move(Direction.PULL, src, one), seed=1000) for one in sets]


def _burst(
    pair: Pair, works: Sequence[Work], counts: tuple[int, int], num_blocks: int
) -> tuple[Grown, Burst]:
    for work in works:
        pair.ask("target", "erase", 0, work.move.dst_blocks)
    pair.ask("target", "erase", 0, (PROBE_BLOCK,))
    grown, burst = pair.burst([work.move for work in works], counts, num_blocks)
    for work in works:
        check_arrived(pair, work)
    if not pair.ask("target", "holds_probe", PROBE_BLOCK):
        raise TransferError("growth: the new block arrived with other contents")
    return grown, burst


def times_of(grown: Grown, burst: Burst) -> Times:
    """The transfers of a burst by whether they overlap its growth."""
    found = Times(growths=[(burst.usable_s - grown.start_s) * 1e3])
    for start_s, end_s in burst.spans:
        overlaps = start_s < burst.usable_s and end_s > grown.start_s
        (found.overlapping if overlaps else found.others).append((end_s - start_s) * 1e3)
    if not found.overlapping or not found.others:
        raise TransferError(
            f"growth: {len(found.overlapping)} transfers overlap it, {len(found.others)} do not: "
            "both are needed"
        )
    return found


def percentile(samples: Sequence[float], percent: int) -> float:
    """By linear interpolation between neighbours."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def _figures(name: str, bursts: Sequence[Times], bar: float | None) -> Iterator[Figure]:
    """The ratio is of all transfers together; its spread is that of the growths' own ratios."""
    overlapping = [ms for one in bursts for ms in one.overlapping]
    others = [ms for one in bursts for ms in one.others]
    ratio = Times(overlapping, others).ratio
    spread = Figure.of("", [one.ratio for one in bursts], "×", "lower").spread_iqr
    metric = f"{name}: p95 of overlapping transfers to that of others"
    yield Figure(metric, ratio, "×", bar, "lower", len(bursts), spread)
    for kind, samples in (("overlapping", overlapping), ("other", others)):
        iqr = Figure.of("", samples, "ms", "lower").spread_iqr
        p95 = percentile(samples, 95)
        yield Figure(f"{name}: p95 of {kind} ones", p95, "ms", None, "lower", len(samples), iqr)
        yield Figure.of(f"{name}: {kind} ones", samples, "ms", "lower")
    growths = [ms for one in bursts for ms in one.growths]
    yield Figure.of(f"{name}: until new memory is of use", growths, "ms", "lower")
