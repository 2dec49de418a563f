"""`kvxfer bench growth`: what growing, shrinking and sleeping cost a worker and its peer, by step.

Two workers without a model, and all else as in service: control loop, transfer thread, growth,
exchange of regions, residency, real connectors, real memory. Where a lane pulls, the source grows;
where it pushes, the target: so the peer is always the one that starts transfers, and the question
is when it can reach what is new. Each pair of a lane and a size has two processes of its own.

What is counted: see `kvxfer.bench.growth_steps`. Every byte that moves is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvxfer.errors import KvxferError, UsageError

if TYPE_CHECKING:
    from kvxfer.bench.growth_cases import Case
    from kvxfer.bench.growth_figures import Found
    from kvxfer.bench.growth_screen import GrowthScreen

HOST_SIZES = (16, 64, 256)
GPU_SIZES = (1024, 8192)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthOptions:
    """What `kvxfer bench growth` may be told."""

    devices: str = "auto"
    """The source's and the target's, such as cuda:0,cuda:1 or cpu,cpu (auto: two GPUs, one twice,
    or the host, whichever is there)."""
    connectors: str = ""
    """Modules of connectors/, comma-separated (default: all that move KV between processes)."""
    lane: str = "auto"
    """push, pull or auto (both, where the connector has both)."""
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = ()
    """MiB that a growth adds, one or several (default: 16 64 256 on the host, 1024 8192 on a
    GPU)."""
    layout: str = "LBHNC"
    """Cache layout of both sides."""
    runs: int = 5
    """Times that each is measured."""
    warm_up: int = 1
    """Times before, which are not counted."""
    transfer_mib: int = 8
    """MiB of each transfer that is in flight while the cache grows."""
    transfers: int = 20
    """Transfers before each growth, and after it, that none overlaps."""
    commit_bar_ms: float | None = None
    """Bar for the commit, written to the result."""
    first_byte_bar_ms: float | None = None
    """Bar for the first verified transfer into or out of new memory, written to the result."""
    in_flight_bar: float | None = None
    """Bar for the 95th percentile of transfers during a growth by that of others."""
    json: Path | None = None
    """Keep the figures in this file, from the first ones on."""
    plot: Path | None = None
    """Draw the steps in this file, .svg or .png (needs matplotlib)."""


def run_growth(options: GrowthOptions) -> int:
    """Measure, print, write; 1 where a bar was missed, a byte was wrong, or a lane did not come to
    its end. Raises KvxferError."""
    from kvxfer.bench.growth_cases import cases_of
    from kvxfer.bench.growth_plot import check_plot, draw
    from kvxfer.bench.growth_screen import GrowthScreen
    from kvxfer.bench.record import command_line
    from kvxfer.bench.report import describe_machine
    from kvxfer.bench.transfer_devices import resolve_devices

    _check(options)
    if options.plot is not None:
        check_plot(options.plot)
    devices = resolve_devices(options.devices)
    sizes = options.sizes or (HOST_SIZES if devices == ("cpu", "cpu") else GPU_SIZES)
    cases, left_out = cases_of(options, devices, sizes)
    machine = describe_machine(devices[1])
    if len(set(devices)) > 1:
        machine = f"2 × {machine}"
    command = command_line("growth", replace(options, plot=None))
    every: list[Found] = []
    with GrowthScreen(f"{devices[0]} to {devices[1]}, {machine}") as screen:
        for reason in left_out:
            screen.say(reason)
        for case in cases:
            _measure(case, options, every, screen, (command, machine))
    screen.show(every)
    if options.plot is not None and any(found.grows for found in every):
        draw(every, machine, options.plot)
        print(f"wrote {options.plot}")
    return _exit_code(every, options, screen)


def _exit_code(every: Sequence[Found], options: GrowthOptions, screen: GrowthScreen) -> int:
    from kvxfer.bench.growth_figures import figures_of
    from kvxfer.bench.record import describe

    missed = [figure for found in every for figure in figures_of(found, options) if not figure.ok]
    for figure in missed:
        screen.say(describe(figure))
    return 1 if missed or not every else 0


def _check(options: GrowthOptions) -> None:
    from kvxfer.transfer.lanes import LANES

    for name in ("runs", "transfer_mib", "transfers"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    if options.warm_up < 0:
        raise UsageError("warm_up", options.warm_up, "is negative")
    if options.lane not in LANES:
        raise UsageError("lane", options.lane, f"must be one of {', '.join(LANES)}")
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            name = "json" if path is options.json else "plot"
            raise UsageError(name, str(path), f"{str(path.parent)!r} is no directory")


def _measure(
    case: Case,
    options: GrowthOptions,
    every: list[Found],
    screen: GrowthScreen,
    origin: tuple[str, str],
) -> None:
    """One lane and size, into `every`. One that fails is kept as far as it came, and says why; one
    that cannot begin, and was not asked for by name, is left out."""
    from kvxfer.bench.growth_figures import Found, figures_of
    from kvxfer.bench.growth_pair import GrowthPair
    from kvxfer.bench.growth_runs import measure
    from kvxfer.bench.report import write_figures

    found = Found(str(case.lane), case.size_mib)

    def keep() -> None:
        if options.json is not None:
            figures = [figure for one in every for figure in figures_of(one, options)]
            write_figures(options.json, figures, *origin)

    task = screen.begin(found.name, 2 * (options.warm_up + options.runs))
    try:
        with GrowthPair(case) as pair:
            every.append(found)
            for _ in measure(pair, case, options, found):
                screen.advance(task)
                keep()
    except KvxferError as error:
        if found not in every and not options.connectors:
            screen.say(f"{found.name}: not measured: {error}")
        else:
            screen.say(f"{found.name}: cut short: {error}")
            if found not in every:
                every.append(found)
            found.problem = str(error)
            keep()
    screen.end(task, found)
