"""What the path between two workers can give at best, as far as it is measured or known.

Known figures were measured with one contiguous copy, verified, on the machines named.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

FLOOR_SHARE = 0.5
"""A lane below this share of the path's ceiling is warned of."""

_KNOWN = {"NVIDIA H200": {"nvlink": 396.0, "local": 2140.0}}
"""GB/s, one direction, by the GPU's name (two H200 of one host, NVLink 4, driver 580)."""
_MEMCPY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    gbps: float
    source: str


def ceiling_between(
    ours: str, theirs: str, same_host: bool, memcpy: Callable[[int], float], num_paths: int = 1
) -> Ceiling | None:
    """Of the path between two devices, by their ids ("" for host memory, else "name uuid"), or of
    `num_paths` such paths beside each other; None where nothing is known, as between hosts.
    `memcpy`: GB/s of so many threads, as `measure_memcpy`."""
    if not same_host:
        return None
    if not ours and not theirs:
        copying = "one thread's" if num_paths == 1 else f"{num_paths} threads'"
        return Ceiling(memcpy(num_paths), f"{copying} memcpy here")
    names = {device.rpartition(" ")[0] for device in (ours, theirs)}
    known = _KNOWN.get(names.pop()) if len(names) == 1 else None
    if known is None:
        return None
    path = "local" if ours == theirs else "nvlink"
    times = "" if num_paths == 1 else f"{num_paths} × "
    return Ceiling(num_paths * known[path], f"{times}known of this GPU, {path}")


def measure_memcpy(num_threads: int = 1) -> float:
    """GB/s of memcpy of 32 MiB by each of so many threads at a time: the best of three."""
    sources, targets = (
        [ctypes.create_string_buffer(_MEMCPY_BYTES) for _ in range(num_threads)] for _ in range(2)
    )

    def copy(index: int) -> None:
        ctypes.memmove(targets[index], sources[index], _MEMCPY_BYTES)  # without the GIL

    quickest = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(3):
            start = time.perf_counter()
            list(threads.map(copy, range(num_threads)))
            quickest = min(quickest, time.perf_counter() - start)
    return num_threads * _MEMCPY_BYTES / quickest / 1e9


def why_slow(connector: str, direction: str, on_gpu: bool, pipelined: bool) -> str:
    """The cause of a slow lane where it is one that we know, and what to do."""
    if connector == "nixl" and on_gpu and not pipelined:
        return "UCX_RMA_PPLN_ENABLE is not y in the environment: unset it, or set it to y"
    if connector == "nixl" and on_gpu and direction == "push":
        return "NIXL pushes growable GPU memory at 0.5 GB/s: leave --lane at auto, or use pull"
    return "cause unknown: `kvxfer doctor` lists what this machine offers"
