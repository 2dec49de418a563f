"""Which device a worker runs on, and how it gets memory there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvxfer.cache.sizing import MemoryPolicy, resolve_policy
from kvxfer.config import WorkerOptions, check_device
from kvxfer.errors import DriverError, OutOfMemory, UsageError
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.host import HostDriver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A driver, and what the options come to on it."""

    driver: VmmDriver
    policy: MemoryPolicy


def resolve_device(name: str) -> str:
    """'auto' becomes cuda:0 where torch sees a GPU, else cpu; what is not there is refused."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if check_device(name) == "auto":
        device = "cuda:0" if count else "cpu"
        logger.info("device %s: torch sees %d CUDA device(s)", device, count)
        return device
    if name == "cpu":
        return name
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise UsageError("device", name, f"torch sees {count} CUDA device(s)")
    return f"cuda:{index}"


def resolve_devices(name: str, size: int) -> list[str]:
    """A device for each of `size` ranks: the CPU for all, or GPUs from the first visible one on,
    or those that a list names. Raises UsageError where there are not as many."""
    if "," in name:
        found = [resolve_device(one) for one in check_device(name).split(",")]
    else:
        first = resolve_device(name)
        if first == "cpu" or size == 1:
            return [first] * size
        index = int(first.partition(":")[2])
        found = [resolve_device(f"cuda:{index + rank}") for rank in range(size)]
    if len(found) != size or len(set(found)) != size:
        raise UsageError("device", name, f"must name {size} devices, one for each rank")
    return found


def resolve_memory(options: WorkerOptions, device: str) -> DeviceMemory:
    """The virtual-memory driver of `device`, or plain memory with the reason (S13)."""
    found = make_driver(device) if options.enable_extensible_kv_cache is not False else ""
    cannot = found if isinstance(found, str) else ""
    policy = resolve_policy(
        options.enable_extensible_kv_cache,
        options.gpu_memory_utilization,
        options.kv_commit == "elastic",
        cannot,
    )
    kind = "extensible" if policy.extensible else "fixed"
    logger.info("KV cache is %s: %s", kind, policy.reason)
    logger.info("gpu_memory_utilization %.2f: %s", policy.utilization, _origin(policy))
    driver = FixedDriver(device) if isinstance(found, str) else found
    return DeviceMemory(driver, policy)


def _origin(policy: MemoryPolicy) -> str:
    return "asked for" if policy.utilization_given else "the default of such a cache"


def make_driver(device: str) -> VmmDriver | str:
    """The driver for a resolved device ('cpu' or 'cuda:N'), or why there is none."""
    if device == "cpu":
        return HostDriver()
    index = int(device.partition(":")[2])
    try:
        return _gpu_driver(index)
    except OutOfMemory:
        raise  # a full GPU is no reason to fall back
    except DriverError as error:
        return f"no virtual-memory driver on {device}: {error}"


def _gpu_driver(index: int) -> VmmDriver:
    import torch

    if torch.version.hip is not None:  # torch calls AMD's devices cuda:N, too
        from kvxfer.memory.hip import HipDriver

        return HipDriver(index)
    from kvxfer.memory.cuda import CudaDriver

    return CudaDriver(index)
