"""`kvxfer bench transfer sweep`: every connector, direction and size of run, as a table.

For users who want to know what their machine gives. Every byte is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from kvxfer.errors import TransferError, UsageError
from kvxfer.transfer.connector import Direction

if TYPE_CHECKING:
    from kvxfer.bench.report import Figure
    from kvxfer.bench.transfer_pair import Pair
    from kvxfer.bench.transfer_rounds import Series
    from kvxfer.bench.transfer_screen import SweepScreen

KNOWN = ("nixl", "peer", "staged")
"""Connectors between processes, tried where they are there."""
GPU_MIB, HOST_MIB = 1024, 128


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What `kvxfer bench transfer sweep` may be told."""

    devices: str = "auto"
    """The source's and the target's, such as cuda:0,cuda:1 or cpu,cpu (auto: two GPUs, one twice,
    or the host, whichever is there)."""
    connectors: str = ""
    """Modules of connectors/, comma-separated (default: all that move KV between processes)."""
    sizes: tuple[int, ...] = (4, 16, 64, 256, 1024, 2048)
    """KiB of the runs that move; given once for each."""
    runs: int = 5
    """Transfers measured of each kind."""
    warm_up: int = 2
    """Transfers of each kind before, which are not."""
    mib: int = 0
    """MiB that a transfer moves (default: 1024 between GPUs, 128 on the host)."""
    json: Path | None = None
    """Keep the figures in this file, from the first ones on."""
    plot: Path | None = None
    """Draw them in this file, .svg or .png (needs matplotlib)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A lane; by KiB of run its median GB/s and the share of a contiguous copy."""

    lane: str
    gbps: dict[int, float]
    shares: dict[int, float]


def run_sweep(options: SweepOptions) -> int:
    """Measure, print, write. Raises KvxferError."""
    from kvxfer.bench.record import command_line
    from kvxfer.bench.report import describe_machine, write_figures
    from kvxfer.bench.transfer_devices import resolve_devices
    from kvxfer.bench.transfer_screen import SweepScreen

    connectors = _checked(options)
    devices = resolve_devices(options.devices)
    command = command_line("transfer sweep", replace(options, plot=None))
    machine = describe_machine(devices[1])
    title = f"{devices[0]} to {devices[1]}, {machine}"
    rows: list[Row] = []
    figures: list[Figure] = []
    with SweepScreen() as screen:
        for name in connectors:
            for row, found in _sweep(name, devices, options, screen):
                rows.append(row)
                figures += found
                if options.json is not None:
                    write_figures(options.json, figures, command, machine)
        screen.show(rows, options.sizes, title)
    if options.plot is not None:
        draw(rows, title, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _checked(options: SweepOptions) -> list[str]:
    """The connectors to measure."""
    from kvxfer.bench.transfer_devices import why_no_connector
    from kvxfer.bench.transfer_shapes import shape_of
    from kvxfer.transfer.connector import check_connectors

    if options.runs < 1:
        raise UsageError("runs", options.runs, "must be at least 1")
    for name in ("warm_up", "mib"):
        if getattr(options, name) < 0:
            raise UsageError(name, getattr(options, name), "is negative")
    if not options.sizes:
        raise UsageError("sizes", list(options.sizes), "needs one at least")
    for size in options.sizes:
        shape_of(size)
    if options.plot is not None:
        _check_plot(options.plot)
    if options.connectors:
        return check_connectors(options.connectors)
    return [name for name in KNOWN if not why_no_connector(name)]


def _check_plot(path: Path) -> None:
    """Before anything is measured."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError("plot", str(path), "must end in .svg or .png")
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        reason = "matplotlib is missing: pip install 'kvxfer[bench]'"
        raise UsageError("plot", str(path), reason) from None


def _sweep(
    name: str,
    devices: tuple[str, str],
    options: SweepOptions,
    screen: SweepScreen,
) -> Iterator[tuple[Row, list[Figure]]]:
    """For each direction that the connector has. One that cannot be opened here says why."""
    from kvxfer.bench.transfer_devices import HOST
    from kvxfer.bench.transfer_pair import Pair
    from kvxfer.bench.transfer_rounds import figures_against_copy, setup_of
    from kvxfer.bench.transfer_shapes import MIB, shape_of, size_name

    size_bytes = (options.mib or (HOST_MIB if devices == HOST else GPU_MIB)) * MIB
    setup = setup_of([shape_of(size) for size in options.sizes], size_bytes)
    with Pair(*devices) as pair:
        try:
            pair.open(name, setup)
        except TransferError as error:
            screen.say(f"{name}: not measured: {error}")
            return
        for direction in sorted(pair.directions):
            lane = f"{name} {direction}"
            found = _measure(pair, lane, direction, size_bytes, options, screen)
            figures: list[Figure] = []
            for size, series in found.items():
                figures += figures_against_copy(f"{lane} {size_name(size)}", series, None)
            yield _row(lane, found), figures


def _measure(
    pair: Pair,
    lane: str,
    direction: Direction,
    size_bytes: int,
    options: SweepOptions,
    screen: SweepScreen,
) -> dict[int, Series]:
    """By KiB of run."""
    from kvxfer.bench.transfer_rounds import measure, work_of
    from kvxfer.bench.transfer_shapes import size_name

    works = [
        work_of(size_name(size), pair.setup, size_bytes, (group, group), direction)
        for group, size in enumerate(options.sizes)
    ]
    advance = screen.begin(lane, len(works) * (options.warm_up + options.runs))
    with_runs = lane.startswith("nixl")
    found = measure(pair, works, options.warm_up, options.runs, with_runs=with_runs, on_run=advance)
    return {size: found[size_name(size)] for size in options.sizes}


def _row(lane: str, found: dict[int, Series]) -> Row:
    return Row(
        lane,
        {size: statistics.median(series.gbps) for size, series in found.items()},
        {size: statistics.median(series.shares) for size, series in found.items()},
    )


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Rates over sizes of runs, a line for each lane. Needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import (  # type: ignore[import-not-found, unused-ignore]
        Figure as Picture,
    )

    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"  # the same figures give the same bytes
    picture = Picture(figsize=(8, 4.5), layout="constrained")
    axes = picture.subplots()
    for row in rows:
        sizes = sorted(row.gbps)
        axes.plot(sizes, [row.gbps[size] for size in sizes], marker="o", label=row.lane)
        copies = [row.gbps[size] / row.shares[size] for size in sizes]
        axes.plot(sizes, copies, linestyle=":", color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KiB of a run")
    axes.set_ylabel("GB/s (dotted: a contiguous copy)")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
