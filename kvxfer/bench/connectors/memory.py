"""Whether what a sweep moves fits in memory: asked before anything is started.

An estimate from below: caches, the buffers of the machine's own copy, and what comparing takes.
What transports take of their own is not in it; a driver that runs short later says so itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvxfer.bench.connectors.sweep import Sweep, Trial
from kvxfer.bench.transfer_shapes import Shape
from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import UsageError

GRANULARITY: Mapping[bool, int] = {True: 64 << 10, False: 2 << 20}
"""Of memory on the host, and on GPUs."""
_COPIES = 3
"""Of a layer of what moved, while it is compared: found, expected, and on the way."""


def check_memory(sweep: Sweep, free: Mapping[str, int], *, is_far: bool) -> None:
    """Raises UsageError for the first kind that takes more of a device than is `free` there.
    `is_far`: the target is on another machine, which looks after itself."""
    for trial in sweep.trials:
        try:
            needs = needs_of(trial, is_far=is_far)
        except UsageError as error:  # more than can be addressed
            raise UsageError("block_sizes", trial.kind.block_bytes, str(error)) from None
        for device, needed in needs.items():
            if needed > free[device]:
                kind, place = trial.kind, "host memory" if device == "cpu" else device
                reason = (
                    f"batches of {kind.batch} such blocks ({kind.layouts}) take "
                    f"{_gib(needed)} of {place}, and {_gib(free[device])} are free"
                )
                raise UsageError("block_sizes", kind.block_bytes, reason)


def needs_of(trial: Trial, *, is_far: bool) -> dict[str, int]:
    """Bytes by device."""
    setting, shapes = trial.setting, trial.setting.shapes
    ends = list(zip((shapes.source, shapes.target), setting.devices, strict=True))
    needed: Counter[str] = Counter()
    for shape, device in ends[:1] if is_far else ends:
        layers = shape.spec.num_layers
        needed[device] += _cache_bytes(shape, setting.capacity, device)
        needed[device] += _COPIES * trial.size_bytes // layers
        if not is_far:
            needed[device] += trial.size_bytes  # the machine's own copy
    return dict(needed)


def free_memory(devices: list[str]) -> dict[str, int]:
    """Bytes of each device that a process may take."""
    from kvxfer.bench.isolated import run_isolated
    from kvxfer.memory.limits import HostMemory

    free = {"cpu": HostMemory().measure().free_bytes}
    gpus = [device for device in devices if device != "cpu"]
    if gpus:
        free |= run_isolated(free_of_gpus, gpus, timeout_s=_GPU_TIMEOUT_S)
    return free


_GPU_TIMEOUT_S = 120.0


def free_of_gpus(devices: list[str]) -> dict[str, int]:
    """In a process of its own: to ask a GPU takes some of its memory."""
    import torch

    return {device: torch.cuda.mem_get_info(device)[0] for device in devices}


def _cache_bytes(shape: Shape, capacity: int, device: str) -> int:
    granularity = GRANULARITY[device == "cpu"]
    geometry = CacheGeometry.build([shape.spec], [shape.layout], [capacity], granularity)
    return geometry.committed_bytes([capacity])


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.3g} GiB"
