"""`kvxfer bench residency`: a thousand random steps of a cache's life, and nothing lost or leaked.

Each step grows, shrinks, puts to sleep and wakes, or packs a cache of two groups; after each, every
block that should have kept its contents is compared. At the end the device's free memory and this
process's open descriptors are what they were.
"""

from __future__ import annotations

import mmap
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.cache.kv_cache import KVCache
    from kvxfer.memory.driver import VmmDriver

SPECS = (
    KVCacheSpec(4, 8, 128, 128, "bfloat16", 16),
    KVCacheSpec(2, 4, 64, 128, "bfloat16", 16, GroupKind.SLIDING, 1024),
)
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLNHC)
HEAP_TOLERANCE_BYTES = 64 << 20
"""On the host, where the interpreter's own heap breathes; on a GPU there is none."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyOptions:
    """What `kvxfer bench residency` may be told."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    steps: int = 1000
    """Random steps."""
    blocks: int = 2048
    """Most blocks of each of the two groups."""
    seed: int = 0
    """Of the steps."""
    json: Path | None = None
    """Write the figures to this file."""


def run_residency(options: ResidencyOptions) -> int:
    """Run, print, write; 1 when anything was lost or leaked. Raises KvxferError."""
    from kvxfer.worker.device import make_driver, resolve_device

    for name in ("steps", "blocks"):
        if getattr(options, name) < 2:
            raise UsageError(name, getattr(options, name), "must be at least 2")
    device = resolve_device(options.device)
    driver = make_driver(device)
    if isinstance(driver, str):
        raise UsageError("device", device, driver)
    record = Record(options.json, command_line("residency", options))
    record.machine = describe_machine(device)
    _live(driver, options, 10)  # contexts, kernels and pools of torch's are taken before measuring
    held, files = _held_bytes(device), _num_open_files()
    took_s, lost = _live(driver, options, options.steps)
    leaked = abs(_held_bytes(device) - held)
    tolerance = HEAP_TOLERANCE_BYTES if device == "cpu" else 0
    record.add(
        Figure("blocks that lost their contents", lost, "blocks", 0, "lower", options.steps, 0.0),
        Figure("memory that did not come back", leaked, "bytes", tolerance, "lower", 1, 0.0),
        Figure("descriptors left open", _num_open_files() - files, "files", 0, "lower", 1, 0.0),
        Figure.of("time of a step, checks included", [took_s / options.steps * 1e3], "ms", "lower"),
    )
    return record.exit_code


def _live(driver: VmmDriver, options: ResidencyOptions, steps: int) -> tuple[float, int]:
    """Seconds, and blocks that were not as they should be."""
    from kvxfer.cache.kv_cache import KVCache

    capacities = [options.blocks] * len(SPECS)
    geometry = CacheGeometry.build(SPECS, LAYOUTS, capacities, driver.granularity)
    cache = KVCache(driver, geometry)
    chance, lost = random.Random(options.seed), 0
    start = time.monotonic()
    try:
        cache.extend([1, 1])
        _fill(cache, (0, 0))
        for _ in range(steps):
            _step(cache, chance, options.blocks)
            lost += _count_wrong(cache)
    finally:
        cache.close()
    return time.monotonic() - start, lost


def _step(cache: KVCache, chance: random.Random, most: int) -> None:
    kept = cache.committed_blocks
    match chance.choice(["grow", "grow", "shrink", "sleep", "defragment"]):
        case "grow":
            room = [chance.randint(blocks, min(most, blocks + most // 4)) for blocks in kept]
            cache.extend(room)
        case "shrink":
            cache.shrink([chance.randint(1, blocks) for blocks in kept])
            return
        case "sleep":
            cache.sleep()
            cache.wake()
            kept = (0, 0)
        case "defragment":
            cache.defragment()
    _fill(cache, kept)


def _fill(cache: KVCache, first: tuple[int, ...]) -> None:
    """Write blocks [first, committed) of each group: a number of each block and layer."""
    for views, start, end in zip(cache.views, first, cache.committed_blocks, strict=True):
        for layer, view in enumerate(views):
            view[start:end] = _pattern(start, end, layer, view)


def _count_wrong(cache: KVCache) -> int:
    wrong = 0
    for views, end in zip(cache.views, cache.committed_blocks, strict=True):
        for layer, view in enumerate(views):
            same = (view[:end] == _pattern(0, end, layer, view)).flatten(1).all(dim=1)
            wrong += end - int(same.sum().item())
    return wrong


def _pattern(start: int, end: int, layer: int, view: Any) -> Any:
    import torch

    numbers = torch.arange(start, end, device=view.device) % 241 + layer
    return numbers.to(view.dtype).view(-1, 1, 1, 1)


def _held_bytes(device: str) -> int:
    """Of a GPU, what all processes hold; of the host's memory, what is resident for this one."""
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
