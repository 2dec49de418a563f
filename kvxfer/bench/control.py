"""`kvxfer bench control`: what a hand-over costs besides the model and the bytes.

A prefill and a decode worker, whole, each a process with its threads, joined by real sockets; the
model computes nothing and the connector moves nothing. The load comes from within decode's process
(`control_load`), since a third one would take of the same cores; decode's CPU time counts it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.thread_times import KINDS
from kvxfer.errors import UsageError
from kvxfer.launch.local import LocalLauncher

START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 600.0
P50_BAR_MS = 1.0
PER_S_BAR = 2000.0


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """What `kvxfer bench control` may be told."""

    rounds: int = 9
    """Each measures hand-overs one after the other, then many at once."""
    alone: int = 300
    """Hand-overs of a round, one after the other."""
    together: int = 3000
    """Hand-overs of a round, many at once."""
    outstanding: int = 32
    """How many those are."""
    json: Path | None = None
    """Write the figures to this file."""


def run_control(options: ControlOptions) -> int:
    """Run, print, write; 1 when a bar was missed. Raises KvxferError."""
    for name, least in (("rounds", 1), ("alone", 2), ("together", 1), ("outstanding", 1)):
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    record = Record(options.json, command_line("control", options))
    record.machine = describe_machine("cpu")
    with ExitStack() as undo:
        found = _measure(options, undo)
    record.add(
        Figure.of("control: accepted to Done, p50", found["p50_ms"], "ms", "lower", P50_BAR_MS),
        Figure.of("control: accepted to Done, p99", found["p99_ms"], "ms", "lower"),
        Figure.of("control: hand-overs of a pair", found["per_s"], "/s", "higher", PER_S_BAR),
        *_cpu_figures(found),
    )
    return record.exit_code


def _cpu_figures(found: dict[str, list[float]]) -> Iterator[Figure]:
    """Where the time goes: CPU time of each hand-over, which a busy machine changes less than it
    changes the others."""
    for phase, when in (("alone", "one by one"), ("together", "many at once")):
        for worker in ("prefill", "decode"):
            kinds = [found[f"{phase} {worker} {kind}"] for kind in KINDS]
            total = [sum(parts) for parts in zip(*kinds, strict=True)]
            yield Figure.of(f"control: CPU of {worker}, {when}", total, "us", "lower")
            for kind, parts in zip(KINDS, kinds, strict=True):
                metric = f"control: CPU of {worker}, {when}: {kind}"
                yield Figure.of(metric, parts, "us", "lower")


def _measure(options: ControlOptions, undo: ExitStack) -> dict[str, list[float]]:
    directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-control-")))
    launcher = undo.enter_context(LocalLauncher(directory, lambda name, text: None))
    prefill = launcher.start("prefill", "prefill.null", _arguments("prefill"))
    launcher.wait_for(lambda: bool(prefill.address), START_TIMEOUT_S, "prefill's address")
    found = directory / "found.json"
    load = [
        *("--prefill", prefill.address),
        *("--found", str(found)),
        *("--prefill-pid", str(prefill.process.pid)),
        *("--rounds", str(options.rounds)),
        *("--alone", str(options.alone)),
        *("--together", str(options.together)),
        *("--outstanding", str(options.outstanding)),
    ]
    launcher.start("decode", "decode.loaded", [*_arguments("decode"), *load])
    launcher.wait_for(found.exists, RUN_TIMEOUT_S, "the measurement", pause_s=0.2)
    figures: dict[str, list[float]] = json.loads(found.read_text())
    return figures


def _arguments(role: str) -> list[str]:
    return [
        *("--model", "none"),
        *("--worker-id", f"{role}-0"),
        *("--device", "cpu"),
        *("--lane", "push"),
        "--no-lane-test",
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--on-peer-loss", "exit"),
    ]
