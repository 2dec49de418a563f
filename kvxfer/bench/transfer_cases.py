"""What `kvxfer bench transfer` measures, case by case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvxfer.bench.report import Figure
from kvxfer.bench.transfer import TransferOptions
from kvxfer.bench.transfer_devices import HOST, why_no_connector
from kvxfer.bench.transfer_overhead import nixl_overhead
from kvxfer.bench.transfer_pair import Pair
from kvxfer.bench.transfer_rounds import (
    Series,
    figures_against_copy,
    measure,
    run_verified,
    setup_of,
    work_of,
    write_sources,
)
from kvxfer.bench.transfer_shapes import MIB, Shape, shape_of, size_name, spec_of
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.transfer.connector import Direction

Found = Iterator[Figure | str]
"""Figures, and in between words for a reader: why something was not measured."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every case is told."""

    options: TransferOptions
    devices: tuple[str, str]
    """The source's and the target's."""

    @property
    def is_two_gpus(self) -> bool:
        return self.devices[0] != self.devices[1]

    @property
    def has_gpu(self) -> bool:
        return self.devices != HOST

    def sizes(self, *default: int) -> tuple[int, ...]:
        """KiB of runs."""
        return self.options.sizes or default

    def bytes_on(self, devices: tuple[str, str]) -> int:
        """That a transfer moves."""
        return (self.options.host_mib if devices == HOST else self.options.mib) * MIB


def figures_of(case: str, bench: Bench) -> Found:
    """Raises KvxferError, after what was found before."""
    return _CASES[case](bench)


def against_copy(
    bench: Bench,
    name: str,
    connector: str,
    devices: tuple[str, str],
    bars: Mapping[int, float],
    direction: Direction = Direction.PULL,
) -> Found:
    """Runs of each size of `bars` (KiB), or as the user says, against a contiguous copy."""
    if reason := why_no_connector(connector):
        yield f"not measured: {reason}"
        return
    sizes = bench.sizes(*bars)
    size_bytes = bench.bytes_on(devices)
    setup = setup_of([shape_of(size) for size in sizes], size_bytes)
    works = [
        work_of(size_name(size), setup, size_bytes, (group, group), direction)
        for group, size in enumerate(sizes)
    ]
    with Pair(*devices) as pair:
        pair.open(connector, setup)
        if direction not in pair.directions:
            yield f"not measured: {connector} does not {direction}"
            return
        options = bench.options
        with_runs = connector.startswith("nixl")
        found = measure(pair, works, options.warm_up, options.runs, with_runs=with_runs)
    for size in sizes:
        series = found[size_name(size)]
        yield from figures_against_copy(f"{name} {size_name(size)}", series, bars.get(size))


def peer_nvlink(bench: Bench) -> Found:
    if not bench.is_two_gpus:
        yield "not measured: needs two GPUs"
        return
    bars = {4: 0.85, 16: 0.92, 64: 0.92, 256: 0.92, 1024: 0.92, 2048: 0.92}
    connector = bench.options.peer_connector
    yield from against_copy(bench, "peer over NVLink", connector, bench.devices, bars)


def peer_one_gpu(bench: Bench) -> Found:
    if not bench.has_gpu:
        yield "not measured: needs a GPU"
        return
    bars = {64: 0.85, 256: 0.85, 1024: 0.85, 2048: 0.85}
    devices = (bench.devices[0], bench.devices[0])
    connector = bench.options.peer_connector
    yield from against_copy(bench, "peer within a GPU", connector, devices, bars)


def peer_host(bench: Bench) -> Found:
    bars = {64: 0.9, 256: 0.9, 1024: 0.9, 2048: 0.9}
    connector = bench.options.peer_connector
    yield from against_copy(bench, "peer on the host", connector, HOST, bars)


def nixl_growable(bench: Bench) -> Found:
    if not bench.has_gpu:
        yield "not measured: needs a GPU"
        return
    staged = bench.options.staged_connector
    for connector, direction, bar in (
        ("nixl", Direction.PULL, 0.65),
        (staged, Direction.PULL, 0.75),
        (staged, Direction.PUSH, 0.75),
    ):
        name = f"{connector} {direction}, growable"
        yield from against_copy(
            bench, name, connector, bench.devices, {64: bar, 1024: bar}, direction
        )


def peer_layouts(bench: Bench) -> Found:
    """Between the quickest devices there are."""
    options, connector = bench.options, bench.options.peer_connector
    if reason := why_no_connector(connector):
        yield f"not measured: {reason}"
        return
    layouts = list(KVCacheLayout)
    size_bytes = bench.bytes_on(bench.devices) // 2  # six groups of it
    setup = setup_of([Shape(spec_of(), layout) for layout in layouts], size_bytes)
    works = [
        work_of(f"{source} to {target}", setup, size_bytes, (i, j))
        for i, source in enumerate(layouts)
        for j, target in enumerate(layouts)
    ]
    with Pair(*bench.devices) as pair:
        pair.open(connector, setup)
        found = measure(pair, works, options.warm_up, options.runs, with_runs=False)
    yield from _layout_figures(found, {f"{layout} to {layout}" for layout in layouts})


def _layout_figures(found: Mapping[str, Series], equal: set[str]) -> Iterator[Figure]:
    """Ratios are of the same round, to the quickest pair of equal layouts."""
    medians = {name: statistics.median(series.gbps) for name, series in found.items()}
    best = max(equal, key=medians.__getitem__)
    worst = min(medians, key=medians.__getitem__)
    rounds = zip(found[worst].gbps, found[best].gbps, strict=True)
    ratios = [one / other for one, other in rounds]
    metric = f"peer layouts: the worst pair ({worst}) to the quickest equal pair ({best})"
    yield Figure.of(metric, ratios, "×", "higher", 0.9)
    for name, series in found.items():
        yield Figure.of(f"peer layouts {name}: rate", series.gbps, "GB/s", "higher")
    shares = found[worst].shares
    yield Figure.of("peer layouts, worst: share of a contiguous copy", shares, "×", "higher")


def peer_vs_nixl(bench: Bench) -> Found:
    """NIXL gets what people have: fixed memory, and UCX's own protocol for it."""
    if not bench.is_two_gpus:
        yield "not measured: needs two GPUs"
        return
    options, connector = bench.options, bench.options.peer_connector
    if reason := why_no_connector(connector):
        yield f"not measured: {reason}"
        return
    bars = {64: 0.93, 1024: 1.15}
    sizes, size_bytes = bench.sizes(*bars), bench.bytes_on(bench.devices)
    shapes = [shape_of(size) for size in sizes]
    setup = setup_of(shapes, size_bytes)
    works = [
        work_of(size_name(size), setup, size_bytes, (group, group))
        for group, size in enumerate(sizes)
    ]
    rates: dict[str, tuple[list[float], list[float]]] = {w.name: ([], []) for w in works}
    with Pair(*bench.devices) as ours, Pair(*bench.devices, {_PIPELINE: "n"}) as theirs:
        ours.open(connector, setup)
        theirs.open("nixl_reference", setup_of(shapes, size_bytes, fixed=True))
        for pair in (ours, theirs):
            write_sources(pair, works)
        for index in range(-options.warm_up, options.runs):
            for work in works:
                for pair, kept in zip((ours, theirs), rates[work.name], strict=True):
                    gbps, _ = run_verified(pair, work, plan=pair is theirs)
                    if index >= 0:
                        kept.append(gbps)
    for size in sizes:
        peer, nixl = rates[size_name(size)]
        name = f"peer against NIXL on fixed memory {size_name(size)}"
        ratios = [one / other for one, other in zip(peer, nixl, strict=True)]
        yield Figure.of(f"{name}: ratio", ratios, "×", "higher", bars.get(size))
        yield Figure.of(f"{name}: peer", peer, "GB/s", "higher")
        yield Figure.of(f"{name}: NIXL", nixl, "GB/s", "higher")


_PIPELINE = "UCX_RMA_PPLN_ENABLE"
"""Fixed memory has no use for the pipeline that connectors/nixl_environment.py turns on."""


def _overhead(bench: Bench) -> Found:
    for devices in (HOST, bench.devices) if bench.has_gpu else (HOST,):
        size_bytes, sizes = bench.bytes_on(devices), bench.sizes(64, 1024)
        yield from nixl_overhead(devices, sizes, size_bytes, bench.options.runs)


_CASES: Mapping[str, Callable[[Bench], Found]] = {
    "peer-nvlink": peer_nvlink,
    "peer-layouts": peer_layouts,
    "peer-vs-nixl": peer_vs_nixl,
    "peer-one-gpu": peer_one_gpu,
    "nixl-growable": nixl_growable,
    "peer-host": peer_host,
    "nixl-overhead": _overhead,
}
