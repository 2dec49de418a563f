"""What one case of `kvxfer bench growth` found, and the figures that it is kept as."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvxfer.bench.growth_flow import Moved
from kvxfer.bench.growth_steps import GROW_STEPS, SHRINK_STEPS, USABLE, Grown
from kvxfer.bench.report import Figure

if TYPE_CHECKING:
    from kvxfer.bench.growth import GrowthOptions

Steps = dict[str, float]
"""Milliseconds of each."""
PARTS = (
    ("growth", GROW_STEPS, "grows"),
    ("shrink", SHRINK_STEPS, "shrinks"),
    ("sleep", SHRINK_STEPS, "sleeps"),
    ("wake", GROW_STEPS, "wakes"),
)
"""What there is of each case: its steps, and where Found has them."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """GB/s of the transfers of one growth: of those that have a moment in common with it, from its
    beginning until its memory is usable, and of the others."""

    during: tuple[float, ...]
    others: tuple[float, ...]

    @classmethod
    def of(cls, moved: Moved, grown: Grown) -> InFlight:
        during: list[float] = []
        others: list[float] = []
        for begin_s, end_s in moved.spans:
            overlaps = begin_s < grown.usable_s and end_s > grown.begin_s
            (during if overlaps else others).append(moved.num_bytes / (end_s - begin_s) / 1e9)
        return cls(tuple(during), tuple(others))

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.during) / statistics.median(self.others)

    @property
    def p95_ratio(self) -> float:
        """Of the 95th percentiles of the times that transfers took."""
        during, others = ([1 / rate for rate in rates] for rates in (self.during, self.others))
        return _p95(during) / _p95(others)


WHO = ("the far end", "the mover")
"""Of transfers in flight: the end that the growth is measured of, whose memory they are of, and the
end that starts them, whose transfer thread grows its cache too."""


@dataclass(eq=False)
class Found:
    """Of one lane and size; rounds that warmed up are in the counts, not in the lists."""

    lane: str
    size_mib: int
    grows: list[Steps] = field(default_factory=list)
    grows_beside: list[Steps] = field(default_factory=list)
    """While transfers are in flight."""
    beside: dict[str, list[InFlight]] = field(default_factory=lambda: {who: [] for who in WHO})
    """Those transfers, by who grows."""
    shrinks: list[Steps] = field(default_factory=list)
    sleeps: list[Steps] = field(default_factory=list)
    wakes: list[Steps] = field(default_factory=list)
    grown_bytes: int = 0
    """By a growth: what was asked for, and what whole granules make of it."""
    woken_bytes: int = 0
    """By a wake-up: that, and what was there before."""
    num_rounds: int = 0
    num_wakes: int = 0
    num_verified: int = 0
    """Transfers of which every byte arrived."""
    num_wrong: int = 0
    num_lost: int = 0
    """Blocks that a shrink should have left alone."""
    num_outlived: int = 0
    """Blocks that hold after a sleep what they held before, of `num_wakes`."""
    is_complete: bool = False
    problem: str = ""
    """Why it is not."""

    @property
    def name(self) -> str:
        return f"{self.lane} {self.size_mib} MiB"


def figures_of(found: Found, options: GrowthOptions) -> list[Figure]:
    """All that there is by now. What is not complete says so by figures that miss their bars."""
    return [
        *_growth(found, options),
        *_beside(found, options),
        *_residency(found),
        *_counts(found, options),
    ]


def median_steps(every: Sequence[Steps], names: Sequence[str]) -> Steps:
    return {name: statistics.median(steps[name] for steps in every) for name in names}


def total(steps: Steps, names: Sequence[str]) -> float:
    return sum(steps[name] for name in names)


def _growth(found: Found, options: GrowthOptions) -> Iterator[Figure]:
    if not found.grows:
        return
    name = f"{found.name}: growth"
    bars = {"extend": options.commit_bar_ms}
    for step in GROW_STEPS:
        samples = [steps[step] for steps in found.grows]
        yield Figure.of(f"{name}: {step}", samples, "ms", "lower", bars.get(step))
    usable = [total(steps, USABLE) for steps in found.grows]
    yield Figure.of(f"{name}: until usable", usable, "ms", "lower")
    verified = [total(steps, GROW_STEPS) for steps in found.grows]
    bar = options.first_byte_bar_ms
    yield Figure.of(f"{name}: until the first verified transfer", verified, "ms", "lower", bar)
    rate = [found.grown_bytes / ms / 1e6 for ms in usable]
    yield Figure.of(f"{name}: rate until usable", rate, "GB/s", "higher")
    rate = [found.grown_bytes / steps["extend"] / 1e6 for steps in found.grows]
    yield Figure.of(f"{name}: rate of extend", rate, "GB/s", "higher")


def _beside(found: Found, options: GrowthOptions) -> Iterator[Figure]:
    for who, every in found.beside.items():
        if not every:
            continue
        name = f"{found.name}: transfers in flight, {who} grows"
        during = [rate for one in every for rate in one.during]
        others = [rate for one in every for rate in one.others]
        yield Figure.of(f"{name}: rate before and after", others, "GB/s", "higher")
        if during:
            yield Figure.of(f"{name}: rate during", during, "GB/s", "higher")
            ratios = [one.ratio for one in every if one.during]
            yield Figure.of(f"{name}: rate during to before and after", ratios, "×", "higher")
            yield _p95_figure(f"{name}: p95 of time during to before and after", every, options)
    if not found.grows_beside:
        return
    name = f"{found.name}: growth beside transfers"
    usable = [total(steps, USABLE) for steps in found.grows_beside]
    yield Figure.of(f"{name}: until usable", usable, "ms", "lower")
    verified = [total(steps, GROW_STEPS) for steps in found.grows_beside]
    yield Figure.of(f"{name}: until the first verified transfer", verified, "ms", "lower")


def _p95_figure(metric: str, every: Sequence[InFlight], options: GrowthOptions) -> Figure:
    """Of all growths' transfers together; the spread is that of the growths' own ratios."""
    each = [one for one in every if one.during]
    during = tuple(rate for one in every for rate in one.during)
    others = tuple(rate for one in every for rate in one.others)
    own = Figure.of("", [one.p95_ratio for one in each], "×", "lower")
    value, bar = InFlight(during, others).p95_ratio, options.in_flight_bar
    return Figure(metric, value, "×", bar, "lower", own.runs, own.spread_iqr)


def _p95(samples: Sequence[float]) -> float:
    """By linear interpolation between neighbours."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[94]


def _residency(found: Found) -> Iterator[Figure]:
    for what, every in (("shrink", found.shrinks), ("sleep", found.sleeps)):
        if every:
            yield from _each(f"{found.name}: {what}", every, SHRINK_STEPS)
            whole = [total(steps, SHRINK_STEPS) for steps in every]
            yield Figure.of(f"{found.name}: {what}: all", whole, "ms", "lower")
    if found.wakes:
        name = f"{found.name}: wake"
        yield from _each(name, found.wakes, GROW_STEPS)
        usable = [total(steps, USABLE) for steps in found.wakes]
        yield Figure.of(f"{name}: until usable", usable, "ms", "lower")
        rate = [found.woken_bytes / ms / 1e6 for ms in usable]
        yield Figure.of(f"{name}: rate until usable", rate, "GB/s", "higher")
        verified = [total(steps, GROW_STEPS) for steps in found.wakes]
        yield Figure.of(f"{name}: until the first verified transfer", verified, "ms", "lower")


def _each(name: str, every: Sequence[Steps], names: Sequence[str]) -> Iterator[Figure]:
    for step in names:
        yield Figure.of(f"{name}: {step}", [steps[step] for steps in every], "ms", "lower")


def _counts(found: Found, options: GrowthOptions) -> Iterator[Figure]:
    """What must be, by bars of 0; rounds that did not come to their end miss theirs."""
    name, rounds = found.name, max(1, found.num_rounds)

    def of(what: str, value: int, unit: str, bar: int | None, is_good: bool = False) -> Figure:
        better: Literal["higher", "lower"] = "higher" if is_good else "lower"
        return Figure(f"{name}: {what}", value, unit, bar, better, rounds, 0.0)

    yield of("transfers with every byte right", found.num_verified, "transfers", None, True)
    yield of("transfers with a wrong byte", found.num_wrong, "transfers", 0)
    yield of("blocks that a shrink should have kept and did not", found.num_lost, "blocks", 0)
    yield of("blocks that outlived a sleep", found.num_outlived, "blocks", None)
    yield of("rounds of growth that ended", found.num_rounds, "rounds", options.runs, True)
    yield of("rounds of sleep that ended", found.num_wakes, "rounds", options.runs, True)
