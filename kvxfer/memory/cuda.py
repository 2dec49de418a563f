"""Virtual memory on an NVIDIA GPU, through the driver's cuMem* calls.

Facts this file relies on (two H200s, driver 580, CUDA 13.0, cuda-bindings 13.3):
- The granularity is 2 MiB, minimum and recommended, for every handle type.
- The FABRIC attribute is 1 where cuMemCreate fails with CUDA_ERROR_NOT_PERMITTED (no IMEX
  channel), and POSIX descriptors are refused in places.
- cuMemUnmap does not wait for work that still uses the range.
- Importing a POSIX descriptor leaves the descriptor with the caller.
- cuMemMap does not grant access; until cuMemSetAccess a touch is a sticky context error.
- Of the calls used here only cuCtxSynchronize and cuMemGetInfo list CUDA_ERROR_INVALID_CONTEXT
  among their results (read in the API reference).
Facts about cuda.bindings (13.0, 13.3 and 13.4, run over a stub by tests/memory/gpu_stub_cases.py):
- It loads libcuda at its first call and raises a RuntimeError of its own without one. A code that
  it does not know is a ValueError, in 13.0 a KeyError.
- Its setter of requestedHandleTypes takes a combination of flags, its getter cannot read one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvxfer.errors import DriverError
from kvxfer.memory.driver import MemoryInfo
from kvxfer.memory.gpu import AllocationKind, GpuDriver, VmmCalls


class CudaDriver(GpuDriver):
    """Works on the device's primary context, which torch uses too and which stays retained for
    the life of the process."""

    def __init__(self, device_index: int = 0) -> None:
        """Raises DriverError without cuda.bindings, a driver, or a device of this index."""
        super().__init__(CudaCalls(device_index))


class CudaCalls(VmmCalls):
    name = "cuda"

    def __init__(self, device_index: int) -> None:
        self.index = device_index
        self._api = _load_bindings()
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", device_index)
        self._primary = self._call("cuDevicePrimaryCtxRetain", device)
        flags = self._api.CUmemAccess_flags
        self._read_only = self._access(flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        self._read_write = self._access(flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

    @contextmanager
    def current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._primary)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def memory_info(self) -> MemoryInfo:
        free, total = self._call("cuMemGetInfo")
        return MemoryInfo(int(free), int(total))

    def properties(self, kind: AllocationKind) -> Any:
        prop = self._api.CUmemAllocationProp()
        prop.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = kind.handle_types
        prop.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.index
        prop.allocFlags.gpuDirectRDMACapable = int(kind.gpu_direct)
        return prop

    def granularity(self, properties: Any) -> int:
        flags = self._api.CUmemAllocationGranularity_flags
        minimum = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", properties, minimum))

    def reserve(self, size_bytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, alignment, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int, properties: Any) -> int:
        return int(self._call("cuMemCreate", size_bytes, properties, 0, wanted=size_bytes))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", self._handle(handle))

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, size_bytes, 0, self._handle(handle), 0, wanted=size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def set_access(self, address: int, size_bytes: int, writable: bool) -> None:
        access = self._read_write if writable else self._read_only
        self._call("cuMemSetAccess", address, size_bytes, [access], 1, wanted=size_bytes)

    def export(self, handle: int) -> int:
        handle = self._handle(handle)
        return int(self._call("cuMemExportToShareableHandle", handle, self._posix_fd, 0))

    def import_(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._posix_fd))

    def error_text(self, code: int) -> str:
        symbol = self._api.cuGetErrorName(self._api.CUresult(code))[1]
        text = self._api.cuGetErrorString(self._api.CUresult(code))[1]
        return f"{(symbol or b'unknown error').decode()}: {(text or b'').decode()}"

    def _access(self, flags: Any) -> Any:
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.index
        access.flags = flags
        return access

    @property
    def _posix_fd(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _handle(self, handle: int) -> Any:
        return self._api.CUmemGenericAllocationHandle(handle)

    def _call(self, name: str, *arguments: object, wanted: int | None = None) -> Any:
        """The result of a driver call: None, one value or a tuple; `wanted` as in `check`."""
        try:
            code, *results = getattr(self._api, name)(*arguments)
        except (RuntimeError, ValueError, KeyError) as error:
            # No libcuda at all, one that lacks this function, or a code newer than the bindings.
            raise DriverError(name, -1, str(error)) from error
        self.check(name, int(code), wanted)
        return tuple(results) if len(results) > 1 else next(iter(results), None)


def _load_bindings() -> Any:
    # Here and not at the top: a machine without the package or a driver can still import this file.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("import cuda.bindings", -1, str(error)) from error
    return driver
