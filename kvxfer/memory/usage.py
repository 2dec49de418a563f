"""What this process takes of the device's memory, apart from its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer.memory.driver import VmmDriver


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes: held now, and the most that was held at any moment so far."""

    used_bytes: int
    peak_bytes: int


class UsageMeter:
    """Measures from its birth on; made before anything large is allocated on the device."""

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._free_at_start = driver.memory_info().free_bytes
        self._base = _resident_bytes("VmRSS") if driver.device == "cpu" else 0

    @property
    def available_bytes(self) -> int:
        """What the process may use in all: free at the start plus what it already held."""
        return self._free_at_start + self._base

    def measure(self, cache_bytes: int) -> MemoryUse:
        """`cache_bytes` of what is held are the KV cache's and not counted.

        On the host resident pages are counted (VmRSS and VmHWM of /proc/self/status); on a GPU
        what went missing since the start, in which other processes of that GPU would show too.
        """
        if self._driver.device == "cpu":
            used = _resident_bytes("VmRSS") - cache_bytes
            return MemoryUse(used, max(used, _resident_bytes("VmHWM") - cache_bytes))
        used = self._free_at_start - self._driver.memory_info().free_bytes - cache_bytes
        return MemoryUse(used, used)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0
