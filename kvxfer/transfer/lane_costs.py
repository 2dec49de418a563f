"""What a transfer costs by each lane of a pair, from what their trials measured. Pure.

    seconds = fixed + runs × seconds a run + bytes × seconds a byte

A trial moves a few blocks, then many, of the same layouts: two points on one line, which tell what
is fixed, but not what is due to runs and what to bytes. A connector that copies boxes knows of no
runs. Of another it is taken that bytes move as quickly as the quickest lane of the pair moved them,
and that what it takes longer is due to its runs: between the same two caches, the path is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import TransferPlan

BOX_COPIERS: Final = ("peer", "staged")
"""Connectors that take no longer for a box of many runs than for one of few."""
_CLEARLY: Final = 0.9
"""Another lane than the pair's is taken for what costs less than such a share: trials are short."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A transfer that went well."""

    num_bytes: int
    num_runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LaneCost:
    """None of it below 0."""

    fixed_s: float
    run_s: float
    byte_s: float

    def seconds(self, num_bytes: int, num_runs: int) -> float:
        return self.fixed_s + num_runs * self.run_s + num_bytes * self.byte_s


LaneCosts: TypeAlias = Mapping[Lane, LaneCost]


@dataclass(slots=True)
class LaneSamples:
    """What the trials of one pair measured, at the end that started the transfers."""

    by_lane: dict[Lane, list[Sample]] = field(default_factory=dict)

    def add(self, lane: Lane, num_bytes: int, num_runs: int, elapsed_ns: int) -> None:
        sample = Sample(num_bytes, num_runs, max(1, elapsed_ns) / 1e9)
        self.by_lane.setdefault(lane, []).append(sample)

    def costs(self, proven: Collection[Lane]) -> dict[Lane, LaneCost]:
        """Of the lanes among `proven` that were measured here."""
        return fit({lane: found for lane, found in self.by_lane.items() if lane in proven})


def fit(samples: Mapping[Lane, Sequence[Sample]]) -> dict[Lane, LaneCost]:
    """Costs that say of the largest transfer of each lane what it took; lanes without a sample of
    some bytes are left out. Of transfers of the same size the quickest counts."""
    lines = {}
    for lane, found in samples.items():
        moved = [one for one in found if one.num_bytes > 0]
        if moved:
            lines[lane] = _line(moved)
    quickest = min((byte_s for _, byte_s, _ in lines.values()), default=0.0)
    return {
        lane: _split(lane, fixed_s, byte_s, quickest, largest)
        for lane, (fixed_s, byte_s, largest) in lines.items()
    }


def _line(samples: Sequence[Sample]) -> tuple[float, float, Sample]:
    """(fixed seconds, seconds a byte, the largest): through the smallest and the largest, or from
    nothing where the smallest took longer than its share, which short transfers do by chance."""
    least, most = (pick(one.num_bytes for one in samples) for pick in (min, max))
    small, large = (
        min((one for one in samples if one.num_bytes == size), key=lambda one: one.seconds)
        for size in (least, most)
    )
    if small.seconds < large.seconds and small.num_bytes < large.num_bytes:
        byte_s = (large.seconds - small.seconds) / (large.num_bytes - small.num_bytes)
        fixed_s = large.seconds - byte_s * large.num_bytes
        if fixed_s >= 0:
            return fixed_s, byte_s, large
    return 0.0, large.seconds / large.num_bytes, large


def _split(lane: Lane, fixed_s: float, byte_s: float, quickest: float, largest: Sample) -> LaneCost:
    if lane.connector in BOX_COPIERS or not largest.num_runs:
        return LaneCost(fixed_s, 0.0, byte_s)
    runs_s = (byte_s - quickest) * largest.num_bytes
    return LaneCost(fixed_s, max(0.0, runs_s) / largest.num_runs, quickest)


def cheapest(
    settled: Lane,
    costs: LaneCosts,
    connectors: Collection[str],
    plans: Iterable[TransferPlan],
) -> Lane:
    """The lane for `plans`, which move together: of `settled`'s direction, by one of `connectors`,
    and of those that `costs` knows; `settled`, unless another one costs clearly less."""
    known = costs.get(settled)
    usable = [
        lane
        for lane in costs
        if lane.direction is settled.direction and lane.connector in connectors
    ]
    if known is None or not usable:
        return settled
    boxes = [box for plan in plans for box in plan.boxes]
    size = sum(box.total_bytes for box in boxes), sum(box.num_runs for box in boxes)
    best = min(usable, key=lambda lane: costs[lane].seconds(*size))
    is_clear = costs[best].seconds(*size) < _CLEARLY * known.seconds(*size)
    return best if is_clear else settled
