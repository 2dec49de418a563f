"""Which way a plan is moved: descriptors over the cache, or gathered through a staging ring. Pure.

    direct   total_bytes / direct rate + num_runs × what a descriptor costs
    staged   total_bytes / staged rate + a fixed cost: the first piece passes gather, transfer and
             scatter one after the other, the later ones at the same time

What goes in, as measured (nixl 1.5.1; a GPU is an H200):
- A descriptor: 0.1–0.2 µs to prepare from numpy, 6 µs to post over cross-memory attach with the
  2 KiB that it stands for. Over NVLink runs of 16 KiB and more are near the full rate.
- Direct: growable GPU memory of one host 250–300 GB/s pulled, 0.5 pushed; fixed memory 300–385.
- Staged: through fixed memory, so 300–385 GB/s less what waits between the pieces. On the host
  each byte is copied three times, by two processes: about half the rate of long direct runs.
"""

from __future__ import annotations

import math
from typing import Literal

from kvxfer.errors import UsageError

Way = Literal["direct", "staged"]


def choose_way(
    num_runs: int,
    total_bytes: int,
    direct_gbps: float,
    staged_gbps: float,
    per_run_s: float,
    fixed_s: float,
) -> Way:
    """The way that takes less time; 'direct' where both take the same.

    `direct_gbps` is the rate of long runs (10^9 bytes a second), `per_run_s` what each run adds to
    it, `fixed_s` what staging adds whatever the size. A rate of 0 says that the way is not there.
    Raises UsageError for a negative number, or where neither way is there.
    """
    for name, value in (
        ("num_runs", num_runs),
        ("total_bytes", total_bytes),
        ("direct_gbps", direct_gbps),
        ("staged_gbps", staged_gbps),
        ("per_run_s", per_run_s),
        ("fixed_s", fixed_s),
    ):
        if not value >= 0:
            raise UsageError(name, value, "must not be negative")
    if not direct_gbps and not staged_gbps:
        raise UsageError("direct_gbps", direct_gbps, "neither way has a rate")
    direct_s = _seconds(total_bytes, direct_gbps) + num_runs * per_run_s
    staged_s = _seconds(total_bytes, staged_gbps) + fixed_s
    return "staged" if staged_s < direct_s else "direct"


def _seconds(total_bytes: int, gbps: float) -> float:
    return total_bytes / (gbps * 1e9) if gbps else math.inf
