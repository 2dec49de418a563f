"""What some runs come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kvxfer.bench.connectors.report import Latency, Spread

US = 1e6


def spread_of(samples: Sequence[float]) -> Spread:
    """0 of none."""
    if not samples:
        return Spread(0.0)
    if len(samples) == 1:
        return Spread(samples[0])
    first, _, third = statistics.quantiles(samples, n=4)
    return Spread(statistics.median(samples), third - first)


def latency_of(seconds: Sequence[float]) -> Latency:
    """In µs. A percentile is the time that so many of the runs did not take longer than: of fewer
    than 1,000 runs p999 is the longest."""
    if not seconds:
        return Latency(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(seconds)

    def within(share: float) -> float:
        # Rounded first: 0.999 × 1,000 is a little more than 999.
        return ordered[math.ceil(round(share * len(ordered), 6)) - 1] * US

    return Latency(statistics.fmean(ordered) * US, within(0.5), within(0.99), within(0.999))


def median_us(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * US if seconds else 0.0
