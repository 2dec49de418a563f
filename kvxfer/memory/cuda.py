"""Virtual memory on an NVIDIA GPU, through the driver's cuMem* calls.

Facts this file relies on (two H200s, driver 580, CUDA 13.0, cuda-bindings 13.3):
- The granularity is 2 MiB, minimum and recommended, for every handle type.
- A handle type must be probed by a real allocation and export: the FABRIC attribute is 1 where
  cuMemCreate fails with CUDA_ERROR_NOT_PERMITTED, and POSIX descriptors are refused in places.
- cuMemUnmap does not wait for work that still uses the range: the context is synchronised first.
- Importing a POSIX descriptor leaves the descriptor with the caller.
- cuMemMap does not grant access; until cuMemSetAccess a touch is a sticky context error.
- cuda.bindings loads libcuda at its first call and raises a RuntimeError of its own without one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvxfer.errors import DriverError, OutOfMemory
from kvxfer.memory.driver import MemoryInfo, VmmDriver


class CudaDriver(VmmDriver):
    """Chunks of one GPU's memory; the handle of a chunk is its CUmemGenericAllocationHandle.

    Works on the device's primary context, which torch uses too and which stays retained for the
    life of the process. A call makes it current for its own duration and then restores what the
    calling thread had: any thread may call, whatever device it works on. `can_export` says whether
    chunks can be handed to other processes, `gpu_direct` whether an RDMA card may reach them, and
    `refused` why anything better was not to be had.
    """

    name = "cuda"

    def __init__(self, device_index: int = 0) -> None:
        """Raises DriverError without cuda.bindings, a driver, or a device of this index."""
        self.device = f"cuda:{device_index}"
        self.refused: tuple[str, ...] = ()
        self._api = _load_bindings()
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", device_index)
        self._primary = self._call("cuDevicePrimaryCtxRetain", device)
        self._access = self._api.CUmemAccessDesc()
        self._access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device_index
        self._access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self._current():
            self._probe(device_index)

    def reserve(self, size_bytes: int) -> int:
        with self._current():
            return int(self._call("cuMemAddressReserve", size_bytes, self.granularity, 0, 0))

    def commit(self, address: int, size_bytes: int) -> int:
        with self._current():
            handle = self._call("cuMemCreate", size_bytes, self._prop, 0, wanted=size_bytes)
            return self._map(address, size_bytes, handle)

    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", address, size_bytes)
            self._call("cuMemRelease", self._api.CUmemGenericAllocationHandle(handle))

    def export(self, handle: int) -> int:
        if not self.can_export:
            code = self._api.CUresult.CUDA_ERROR_NOT_SUPPORTED
            raise DriverError("export", int(code), "this device's memory cannot be exported")
        with self._current():
            return self._export(self._api.CUmemGenericAllocationHandle(handle))

    def import_(self, fd: int, address: int, size_bytes: int) -> int:
        with self._current():
            handle = self._call("cuMemImportFromShareableHandle", fd, self._posix_fd)
            return self._map(address, size_bytes, handle)

    def free(self, address: int, size_bytes: int) -> None:
        with self._current():
            self._call("cuMemAddressFree", address, size_bytes)

    def memory_info(self) -> MemoryInfo:
        with self._current():
            free, total = self._call("cuMemGetInfo")
            return MemoryInfo(int(free), int(total))

    @property
    def _posix_fd(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _map(self, address: int, size_bytes: int, handle: Any) -> int:
        """Map a fresh `handle`, whose only owner this is, or release it and raise."""
        with ExitStack() as undo:
            undo.callback(self._call, "cuMemRelease", handle)
            self._call("cuMemMap", address, size_bytes, 0, handle, 0, wanted=size_bytes)
            undo.callback(self._call, "cuMemUnmap", address, size_bytes)
            self._call("cuMemSetAccess", address, size_bytes, [self._access], 1, wanted=size_bytes)
            undo.pop_all()
        return int(handle)

    def _export(self, handle: Any) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._posix_fd, 0))

    def _probe(self, device_index: int) -> None:
        """Take the most capable kind of allocation that this device really gives."""
        none = self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        kinds = [(self._posix_fd, True), (self._posix_fd, False), (none, True), (none, False)]
        for handle_type, gpu_direct in kinds:
            try:
                self._prop = self._properties(device_index, handle_type, gpu_direct)
                self.granularity = self._granularity()
                self._try_allocation(exported=handle_type == self._posix_fd)
            except OutOfMemory:
                raise
            except DriverError as error:
                self.refused += (f"{handle_type.name}, gpu_direct={gpu_direct}: {error}",)
                if (handle_type, gpu_direct) == kinds[-1]:
                    raise
            else:
                self.can_export = handle_type == self._posix_fd
                self.gpu_direct = gpu_direct
                return

    def _properties(self, device_index: int, handle_type: Any, gpu_direct: bool) -> Any:
        prop = self._api.CUmemAllocationProp()
        prop.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = handle_type
        prop.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device_index
        prop.allocFlags.gpuDirectRDMACapable = int(gpu_direct)
        return prop

    def _granularity(self) -> int:
        flags = self._api.CUmemAllocationGranularity_flags
        minimum = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._prop, minimum))

    def _try_allocation(self, exported: bool) -> None:
        size = self.granularity
        with ExitStack() as undo:
            handle = self._call("cuMemCreate", size, self._prop, 0, wanted=size)
            undo.callback(self._call, "cuMemRelease", handle)
            if exported:
                os.close(self._export(handle))

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._primary)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: object, wanted: int | None = None) -> Any:
        """The result of a driver call: None, one value or a tuple.

        Raises OutOfMemory where the call reports it and `wanted` bytes of memory were asked for,
        else DriverError with the driver's name and text of the code.
        """
        try:
            code, *results = getattr(self._api, name)(*arguments)
        except RuntimeError as error:
            # cuda.bindings: no libcuda at all, or one that lacks this function.
            raise DriverError(name, -1, str(error)) from error
        if code != self._api.CUresult.CUDA_SUCCESS:
            if code == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY and wanted is not None:
                free, _ = self._call("cuMemGetInfo")
                raise OutOfMemory(name, int(code), wanted, int(free))
            raise DriverError(name, int(code), self._text(code))
        return tuple(results) if len(results) > 1 else next(iter(results), None)

    def _text(self, code: Any) -> str:
        _, symbol = self._api.cuGetErrorName(code)
        _, text = self._api.cuGetErrorString(code)
        return f"{(symbol or b'unknown error').decode()}: {(text or b'').decode()}"


def _load_bindings() -> Any:
    # Here and not at the top: a machine without the package or a driver can still import this file.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("import cuda.bindings", -1, str(error)) from error
    return driver
