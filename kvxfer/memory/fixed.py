"""Memory that does not grow: one plain allocation, all of it there from the start.

The fallback where a device has no virtual-memory driver, and the baseline that growable memory is
compared with. It keeps the driver contract's shape and not its point: nothing faults, and
committing costs and changes nothing.
"""

from __future__ import annotations

from itertools import count

import torch

from kvxfer.errors import DriverError, OutOfMemory
from kvxfer.memory.driver import MemoryInfo, VmmDriver
from kvxfer.memory.limits import HostMemory

GRANULARITY = 64 << 10


class FixedDriver(VmmDriver):
    """torch's allocator (malloc or cudaMalloc) behind the driver contract."""

    name = "fixed"
    granularity = GRANULARITY

    def __init__(self, device: str) -> None:
        self.device = device
        self._host = HostMemory()
        self._tensors: dict[int, torch.Tensor] = {}
        self._handles = count(1)

    def reserve(self, size_bytes: int) -> int:
        """Allocates `size_bytes` at once, as zeros, so that the host populates it now."""
        try:
            tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            free = self.memory_info().free_bytes
            raise OutOfMemory("torch.zeros", 2, size_bytes, free) from error
        self._tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def commit(self, address: int, size_bytes: int) -> int:
        return next(self._handles)

    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        """The pages stay until the whole reservation is freed."""

    def export(self, handle: int, writable: bool = True) -> int:
        raise DriverError("export", 0, "fixed memory has no handles to share")

    def import_(self, fd: int, address: int, size_bytes: int, writable: bool = True) -> int:
        raise DriverError("import", 0, "fixed memory cannot map another's")

    def free(self, address: int, size_bytes: int) -> None:
        del self._tensors[address]

    def memory_info(self) -> MemoryInfo:
        if self.device == "cpu":
            return self._host.measure()
        return MemoryInfo(*torch.cuda.mem_get_info(self.device))
