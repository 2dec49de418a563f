"""A measured figure, and the file it is kept in."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

PACKAGES = (
    "torch",
    "nixl",
    "cuda-bindings",
    "transformers",
    "pyzmq",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Median of `runs` with the distance between quartiles; `bar` None: nothing was promised."""

    metric: str
    value: float
    unit: str
    bar: float | None
    better: Literal["higher", "lower"]
    runs: int
    spread_iqr: float

    @classmethod
    def of(
        cls,
        metric: str,
        samples: Sequence[float],
        unit: str,
        better: Literal["higher", "lower"],
        bar: float | None = None,
    ) -> Figure:
        quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [0.0, 0.0, 0.0]
        spread = quartiles[2] - quartiles[0]
        return cls(metric, statistics.median(samples), unit, bar, better, len(samples), spread)

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


def write_figures(path: Path, figures: Sequence[Figure], command: str, machine: str) -> None:
    """One JSON list: each figure with what it was measured on, of which commit, and how."""
    context = {
        "machine": machine,
        "versions": versions(),
        "commit": measured_commit(),
        "command": command,
    }
    records = [{**asdict(figure), "ok": figure.ok, **context} for figure in figures]
    path.write_text(json.dumps(records, indent=1) + "\n")


def describe_machine(device: str) -> str:
    """The device's name and the number of CPUs."""
    cpus = f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}"
    if device == "cpu":
        return cpus
    import torch

    return f"{torch.cuda.get_device_name(device)}, {cpus}"


def versions() -> dict[str, str]:
    """Of Python, and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def measured_commit() -> str:
    """The commit measured, '-dirty' if the tree had changes when this was asked first: files of
    figures written since do not count. Where it runs from a copy, whose git directory is another's
    or missing, KVXFER_COMMIT says it."""
    if given := os.environ.get("KVXFER_COMMIT", ""):
        return given
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
