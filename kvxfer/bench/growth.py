"""`kvxfer bench growth`: how long until memory that was just committed is of use to a peer.

Two processes. The owner extends its cache, fills one block at the very end of the new range,
registers what is new and describes it; the peer loads the description, pulls that block and
compares every byte. Times are CLOCK_MONOTONIC's, which both processes share.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from kvxfer.bench.report import Figure, describe_machine, write_figures
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import DeadlineExceeded, KvxferError, UsageError, WorkerDied

GIB = 1 << 30
STEP_TIMEOUT_S = 60.0
SPEC = KVCacheSpec(
    num_layers=32, num_kv_heads=8, head_dim_k=128, head_dim_v=128, dtype="bfloat16", block_size=16
)
"""A block is 2 MiB; LBHNC has 32 segments."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthOptions:
    """What `kvxfer bench growth` may be told."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    gib: float = 0.25
    """GiB that the extension adds."""
    layout: str = "LBHNC"
    """Cache layout of both sides."""
    runs: int = 5
    """Extensions measured, each of a new cache; the first, which warms up, is not counted."""
    connector: str = "nixl"
    """Module of connectors/ that moves KV."""
    commit_bar_ms: float | None = None
    """Bar for the commit, written to the result."""
    first_byte_bar_ms: float | None = None
    """Bar for the first verified byte at the peer, written to the result."""
    json: Path | None = None
    """Write the figures to this file."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds from the start of the extension."""

    committed: float
    registered: float
    described: float
    loaded: float
    verified: float


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the owner tells the peer; plain values, since it crosses a process."""

    base_address: int
    device: str
    description: bytes
    new_blocks: int
    regions: list[tuple[int, int]]


def run_growth(options: GrowthOptions) -> int:
    """Measure, print, write; 1 when a bar was missed. Raises KvxferError."""
    from kvxfer.worker.device import resolve_device

    if options.runs < 1:
        raise UsageError("runs", options.runs, "must be at least 1")
    if options.gib * GIB < 2 * SPEC.block_bytes:
        raise UsageError("gib", options.gib, "is less than two blocks")
    layout = KVCacheLayout.parse("layout", options.layout)
    device = resolve_device(options.device)
    timings = []
    for run in range(options.runs + 1):
        timing = _measure(options, layout, device)
        print(f"run {run}: {_line(timing)}{'' if run else ' (warm-up, not counted)'}", flush=True)
        timings.append(timing)
    figures = _figures(timings[1:], options)
    for figure in figures:
        bar = (
            ""
            if figure.bar is None
            else f" (bar {figure.bar:g}, {'ok' if figure.ok else 'MISSED'})"
        )
        print(f"{figure.metric:<34}{figure.value:>10.1f} {figure.unit}{bar}")
    if options.json is not None:
        command = (
            f"kvxfer bench growth --device {options.device} --gib {options.gib:g} "
            f"--layout {options.layout} --runs {options.runs}"
        )
        write_figures(options.json, figures, command, describe_machine(device))
    return 0 if all(figure.ok for figure in figures) else 1


def _line(timing: Timing) -> str:
    names = ("committed", "registered", "described", "loaded", "verified")
    return ", ".join(f"{name} {getattr(timing, name):.1f} ms" for name in names)


def _figures(timings: list[Timing], options: GrowthOptions) -> list[Figure]:
    def of(metric: str, name: str, bar: float | None = None) -> Figure:
        samples = [getattr(timing, name) for timing in timings]
        return Figure.of(f"{metric} ({options.gib:g} GiB)", samples, "ms", "lower", bar)

    return [
        of("extension committed", "committed", options.commit_bar_ms),
        of("extension registered", "registered"),
        of("first verified byte at a peer", "verified", options.first_byte_bar_ms),
    ]


def _measure(options: GrowthOptions, layout: KVCacheLayout, device: str) -> Timing:
    """One extension in this process, seen by a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=_peer, args=(theirs, options.connector, layout, device))
    peer.start()
    theirs.close()
    try:
        _receive(ours, peer)  # it is ready
        return _own(options, layout, device, ours, peer)
    finally:
        ours.close()
        peer.join(5.0)
        if peer.is_alive():
            peer.kill()
            peer.join(5.0)


def _own(
    options: GrowthOptions, layout: KVCacheLayout, device: str, pipe: Connection, peer: Any
) -> Timing:
    import torch

    from kvxfer.transfer.regions import Region

    blocks = 1 + int(options.gib * GIB) // SPEC.block_bytes
    with ExitStack() as undo:
        cache, connector = _open(options.connector, layout, device, blocks, "owner", undo)
        cache.extend([1])
        start = time.monotonic()
        (new_blocks,) = cache.extend([blocks]).new_blocks
        committed = time.monotonic()
        for view in cache.views[0]:
            view[new_blocks - 1].fill_(1.5)
        if device != "cpu":
            torch.cuda.synchronize(device)
        regions = [Region(chunk.offset, chunk.size) for chunk in cache.buffer.chunks]
        connector.register(regions)
        undo.callback(connector.deregister, regions)
        registered = time.monotonic()
        description = connector.describe(regions)
        offer = _Offer(
            cache.buffer.base_address,
            device,
            description,
            new_blocks,
            [(region.offset, region.size) for region in regions],
        )
        described = time.monotonic()
        pipe.send(offer)
        loaded, verified = _serve_until(pipe, peer, connector.poll)
    moments = (committed, registered, described, loaded, verified)
    return Timing(*((moment - start) * 1e3 for moment in moments))


def _open(
    connector: str, layout: KVCacheLayout, device: str, blocks: int, name: str, undo: ExitStack
) -> tuple[Any, Any]:
    """A cache of `blocks` reserved blocks and a connector over it; closed by `undo`."""
    from kvxfer.cache.budget import open_files_needed
    from kvxfer.cache.kv_cache import KVCache
    from kvxfer.memory.chunks import LARGEST_CHUNK
    from kvxfer.memory.limits import ensure_open_files
    from kvxfer.transfer.connector import MemoryWindow, load_connector
    from kvxfer.worker.device import make_driver

    driver = make_driver(device)
    if isinstance(driver, str):
        raise UsageError("device", device, driver)
    geometry = CacheGeometry.build([SPEC], [layout], [blocks], driver.granularity)
    if device == "cpu":
        ensure_open_files(open_files_needed(geometry.groups[0], blocks, LARGEST_CHUNK))
    cache = KVCache(driver, geometry)
    undo.callback(cache.close)
    window = MemoryWindow(cache.buffer.base_address, geometry.total_bytes, device)
    transport = load_connector(connector)(f"bench.{name}", window)
    undo.callback(transport.close)
    return cache, transport


def _serve_until(
    pipe: Connection, peer: Any, progress: Callable[[], object]
) -> tuple[float, float]:
    """Let the peer work, giving it our progress, until it says when it had loaded and verified."""
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not pipe.poll(0.0005):
        progress()
        if time.monotonic() > deadline_s or not peer.is_alive():
            raise DeadlineExceeded(f"the peer did not verify within {STEP_TIMEOUT_S:g} s")
    loaded, verified = _receive(pipe, peer)
    return loaded, verified


def _receive(pipe: Connection, peer: Any) -> Any:
    if not pipe.poll(STEP_TIMEOUT_S):
        raise DeadlineExceeded(f"the peer said nothing for {STEP_TIMEOUT_S:g} s")
    try:
        message = pipe.recv()
    except EOFError:
        raise WorkerDied(f"the peer (pid {peer.pid}) ended") from None
    if isinstance(message, str):
        raise WorkerDied(f"the peer failed: {message}")
    return message


def _peer(pipe: Connection, connector: str, layout: KVCacheLayout, device: str) -> None:
    """The other process: pull the last block of what is offered, and compare all of it."""
    try:
        with ExitStack() as undo:
            cache, transport = _open(connector, layout, device, 2, "peer", undo)
            _pull(pipe, cache, transport, undo)
    except KvxferError as error:
        pipe.send(str(error))


def _pull(pipe: Connection, cache: Any, transport: Any, undo: ExitStack) -> None:
    from kvxfer.transfer.connector import Direction
    from kvxfer.transfer.plan import CacheSide, plan_transfer
    from kvxfer.transfer.regions import Region, RegionSet

    cache.extend([2])
    own = [Region(chunk.offset, chunk.size) for chunk in cache.buffer.chunks]
    transport.register(own)
    undo.callback(transport.deregister, own)
    pipe.send((0.0, 0.0))
    offer: _Offer = pipe.recv()
    transport.connect("owner", offer.base_address, offer.description)
    loaded = time.monotonic()
    regions = RegionSet(tuple(Region(*region) for region in sorted(offer.regions)), 1)
    own_group = cache.geometry.groups[0]
    geometry = GroupGeometry.build(SPEC, own_group.layout, offer.new_blocks, own_group.granularity)
    source = CacheSide(geometry, regions, [offer.new_blocks - 1])
    target = CacheSide(own_group, RegionSet(tuple(sorted(own)), 1), [1])
    plan = plan_transfer(source, target, range(SPEC.block_size))
    ticket = transport.submit("owner", Direction.PULL, plan)
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not (ended := [r for r in transport.poll() if r.ticket == ticket]):
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded("the pull did not end")
    if ended[0].error or not all(bool((view[1] == 1.5).all()) for view in cache.views[0]):
        raise WorkerDied(ended[0].error or "what was pulled is not what was written")
    pipe.send((loaded, time.monotonic()))
