"""What this process takes of the device's memory, and whether it has the device to itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvxfer.memory.driver import MemoryInfo, VmmDriver

logger = logging.getLogger(__name__)

SHARED_BYTES = 1 << 30
"""A GPU with this much in use before the worker took anything is evidently shared: contexts and
the driver's own take a few hundred MiB."""


class UsageMeter:
    """Measures from its birth on; made before anything large is allocated on the device.

    On the host resident pages are counted (VmRSS and VmHWM of /proc/self/status); on a GPU what
    went missing since the start, in which other processes of that GPU show too (S14).
    """

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._on_host = driver.device == "cpu"
        self.at_start: MemoryInfo = driver.memory_info()
        self._base = _resident_bytes("VmRSS") if self._on_host else 0
        if self._on_host:
            _forget_peak()

    def available_bytes(self, utilization: float, budget_bytes: int) -> int:
        """What the process may use in all: a share of the device's memory, no more than was free
        when it started, no more than the launcher's budget (0: none was set)."""
        free = self.at_start.free_bytes + self._base
        available = min(int(utilization * self.at_start.total_bytes), free)
        return min(available, budget_bytes) if budget_bytes else available

    def used_bytes(self, cache_bytes: int) -> int:
        """Held now; `cache_bytes` of it are the KV cache's and not counted."""
        if self._on_host:
            return _resident_bytes("VmRSS") - cache_bytes
        return self.at_start.free_bytes - self._driver.memory_info().free_bytes - cache_bytes

    def peak_bytes(self, used_bytes: int, cache_bytes: int) -> int:
        """The most that was held beyond `used_bytes` at any moment so far.

        On a GPU torch's pools keep their peak, so that it is part of what is used; of it, what is
        not allocated now is what a step takes for a moment.
        """
        if self._on_host:
            return max(0, _resident_bytes("VmHWM") - cache_bytes - used_bytes)
        import torch

        device = self._driver.device
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    def shared_with(self) -> str:
        """Who else is on the GPU, in words; '' if it seems to be this worker's alone."""
        if self._on_host:
            return ""
        others = _other_gpu_processes(self._driver.device)
        if others:
            return f"processes {', '.join(map(str, others))} run on it"
        used = self.at_start.total_bytes - self.at_start.free_bytes
        if used > SHARED_BYTES:
            return f"{used >> 20} MiB of it were in use before this worker started"
        return ""


def _other_gpu_processes(device: str) -> list[int]:
    """Process ids that NVML names on `device`, without ours; none where NVML cannot tell."""
    try:
        import pynvml
        import torch
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return sorted(process.pid for process in found if process.pid != os.getpid())


def _forget_peak() -> None:
    """Have VmHWM begin anew: what this process held before it was to be measured tells nothing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        logger.debug("the peak of earlier work counts as well: %s", error)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0
