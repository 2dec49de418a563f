"""`kvxfer bench buffer`: which share of the transient peak a long service really needs.

The sizing keeps 20 % of warm-up's transient peak free (S10), a number that nobody fitted. Here a
mixed load runs for minutes with room to spare, and what the process holds besides its KV is
logged; the smallest fraction that would have covered its growth is fitted, and then tried: with a
cache that leaves exactly that much, the beginning of the same load runs again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.service_options import ServiceOptions
from kvxfer.errors import UsageError


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions(ServiceOptions):
    """What `kvxfer bench buffer` may be told."""

    sequences: int = 256
    """Sequences served at once, at the most."""
    prompt_tokens: int = 512
    """Tokens of the longest prompt."""
    steps: int = 32
    """Speculative steps after which a sequence begins anew, at the latest."""
    minutes: float = 10.0
    """How long the mixed load runs."""
    confirm_s: float = 15.0
    """Of the load's beginning, what is run again to confirm a fraction, in seconds."""
    spare: float = 1.0
    """Room for growth during the long run, beyond the usual buffer, in transient peaks."""
    plot: Path | None = None
    """The picture (default: beside the figures, as .svg)."""


def run_buffer(options: BufferOptions) -> int:
    """Measure, print, write; 1 when a bar was missed. Raises KvxferError."""
    from kvxfer.bench.buffer_run import measure_buffer
    from kvxfer.bench.service_engine import service_setup

    if options.minutes <= 0 or options.confirm_s <= 0:
        raise UsageError("minutes", options.minutes, "must be more than 0, as confirm_s must")
    if options.spare < 0:
        raise UsageError("spare", options.spare, "is negative")
    with service_setup(options) as setup:
        return measure_buffer(options, setup)
