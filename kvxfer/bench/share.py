"""`kvxfer bench share`: how much of what could be KV the measurement makes KV.

One process starts the growable way, and then grows the cache beyond what the measurement paid for,
to find by bisection the largest with which the same load still runs. Every try begins with
torch's unused memory given back, and generates the same tokens as the measured size did.
"""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from kvxfer.bench.isolated import run_isolated
from kvxfer.bench.service_options import ServiceOptions
from kvxfer.errors import UsageError

SHARE_BAR = 0.97


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOptions(ServiceOptions):
    """What `kvxfer bench share` may be told."""

    resolution_mib: int = 128
    """The bisection ends when the largest size is known to so many MiB."""
    most_gib: float = 0.0
    """GiB beyond the measured size that are tried at the most (default: all that is left)."""
    timeout_s: float = 540.0
    """Deadline of the measuring process."""


def run_share(options: ShareOptions) -> int:
    """Measure, print, write; 1 when the bar was missed. Raises KvxferError."""
    from kvxfer.bench.service_engine import service_setup
    from kvxfer.bench.share_trial import measure_share

    if options.resolution_mib < 1:
        raise UsageError("resolution_mib", options.resolution_mib, "must be at least 1")
    with service_setup(options) as setup:
        return run_isolated(measure_share, options, setup, timeout_s=options.timeout_s)
