"""Virtual memory on an AMD GPU, through the HIP runtime's hipMem* calls.

This file has never run on an AMD GPU. Its calls, structures and undoing run over a stub in CI
(tests/support/vmm_stub.c), which is as strict as the sources below say that the runtime is.

Facts this file relies on, all read, none measured. H is ROCm/rocm-systems
projects/hip/include/hip/hip_runtime_api.h at f414ba2d197a, C is
projects/clr/hipamd/src/hip_vm.cpp at 048cb7b7ed02 in the same repository:
- The structures and constants below are H's; hipMemLocation is driver_types.h's, beside it.
- ctypes is used because the Python package of AMD lacks the union with requestedHandleTypes, so
  that an exportable allocation cannot be asked for through it.
- Before 7.12 hipMemSetAccess sums allocations from the reservation's first one on, wherever the
  range lies, and fails, at times only, when those differ in size, as a growing cache's do
  (rocm-systems #2451). No 7.2 release has the fix: older runtimes are refused.
- hipMemSetAccess hands the flag for reading only on to the device (C).
- hipMemCreate takes one handle type, FABRIC or a descriptor or none, and answers a combination
  with hipErrorNotSupported; hipMemExportToShareableHandle wants just the type asked for then (C).
- hipMemCreate and hipMemImportFromShareableHandle allocate on the calling thread's current device,
  whatever the properties say (C). hipMemImportFromShareableHandle refuses descriptor 0: it is
  passed as a pointer, and NULL is none (C).
- hipMemAddressFree does not look whether something is mapped, nor hipMemRelease whether a handle
  is alive (C): who calls must know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from kvxfer.errors import DriverError, DriverTooOld
from kvxfer.memory.driver import MemoryInfo
from kvxfer.memory.gpu import AllocationKind, GpuDriver, HandleTypes, VmmCalls

OLDEST_RUNTIME = (7, 12)

_LIBRARY = "libamdhip64.so"
_ALLOCATION_PINNED = 1
_LOCATION_DEVICE = 1
_ACCESS_READ, _ACCESS_READ_WRITE = 1, 3
_GRANULARITY_MINIMUM = 0


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
    )


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", _Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _AllocFlags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


# All return hipError_t, an int.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipInit": (c_uint,),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceSynchronize": (),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProp), c_int),
    "hipMemAddressReserve": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemAddressFree": (c_void_p, c_size_t),
    "hipMemCreate": (POINTER(c_void_p), c_size_t, POINTER(_AllocationProp), c_ulonglong),
    "hipMemRelease": (c_void_p,),
    "hipMemMap": (c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemUnmap": (c_void_p, c_size_t),
    "hipMemSetAccess": (c_void_p, c_size_t, POINTER(_AccessDesc), c_size_t),
    "hipMemExportToShareableHandle": (c_void_p, c_void_p, c_int, c_ulonglong),
    "hipMemImportFromShareableHandle": (POINTER(c_void_p), c_void_p, c_int),
}


class HipDriver(GpuDriver):
    """Not usable below OLDEST_RUNTIME. Never run on an AMD GPU: see the top of this file."""

    def __init__(self, device_index: int = 0) -> None:
        """Raises DriverTooOld for a broken runtime, DriverError without a runtime, a GPU, or a
        device of this index."""
        super().__init__(HipCalls(device_index))


class HipCalls(VmmCalls):
    name = "hip"

    def __init__(self, device_index: int) -> None:
        self.index = device_index
        self._library = _load_runtime()
        self._check_version()
        self._call("hipInit", 0)
        location = _Location(_LOCATION_DEVICE, device_index)
        self._read_only = _AccessDesc(location, _ACCESS_READ)
        self._read_write = _AccessDesc(location, _ACCESS_READ_WRITE)

    @contextmanager
    def current(self) -> Iterator[None]:
        before = c_int()
        self._call("hipGetDevice", byref(before))
        self._call("hipSetDevice", self.index)
        try:
            yield
        finally:
            self._call("hipSetDevice", before)

    def synchronize(self) -> None:
        self._call("hipDeviceSynchronize")

    def memory_info(self) -> MemoryInfo:
        free, total = c_size_t(), c_size_t()
        self._call("hipMemGetInfo", byref(free), byref(total))
        return MemoryInfo(free.value, total.value)

    def properties(self, kind: AllocationKind) -> Any:
        return _AllocationProp(
            type=_ALLOCATION_PINNED,
            requestedHandleTypes=kind.handle_types,
            location=_Location(_LOCATION_DEVICE, self.index),
            allocFlags=_AllocFlags(gpuDirectRDMACapable=kind.gpu_direct),
        )

    def granularity(self, properties: Any) -> int:
        size = c_size_t()
        arguments = byref(size), byref(properties), _GRANULARITY_MINIMUM
        self._call("hipMemGetAllocationGranularity", *arguments)
        return size.value

    def reserve(self, size_bytes: int, alignment: int) -> int:
        address = c_void_p()
        self._call("hipMemAddressReserve", byref(address), size_bytes, alignment, None, 0)
        return address.value or 0

    def free(self, address: int, size_bytes: int) -> None:
        self._call("hipMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int, properties: Any) -> int:
        handle = c_void_p()
        arguments = byref(handle), size_bytes, byref(properties), 0
        self._call("hipMemCreate", *arguments, wanted=size_bytes)
        return handle.value or 0

    def release(self, handle: int) -> None:
        self._call("hipMemRelease", handle)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("hipMemMap", address, size_bytes, 0, handle, 0, wanted=size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("hipMemUnmap", address, size_bytes)

    def set_access(self, address: int, size_bytes: int, writable: bool) -> None:
        access = self._read_write if writable else self._read_only
        arguments = address, size_bytes, byref(access), 1
        self._call("hipMemSetAccess", *arguments, wanted=size_bytes)

    def export(self, handle: int) -> int:
        fd = c_int(-1)
        arguments = byref(fd), handle, HandleTypes.POSIX_FD, 0
        self._call("hipMemExportToShareableHandle", *arguments)
        return fd.value

    def import_(self, fd: int) -> int:
        handle = c_void_p()
        arguments = byref(handle), fd, HandleTypes.POSIX_FD
        self._call("hipMemImportFromShareableHandle", *arguments)
        return handle.value or 0

    def error_text(self, code: int) -> str:
        symbol = self._library.hipGetErrorName(code)
        text = self._library.hipGetErrorString(code)
        return f"{(symbol or b'unknown error').decode()}: {(text or b'').decode()}"

    def _check_version(self) -> None:
        encoded = c_int()
        self._call("hipRuntimeGetVersion", byref(encoded))
        found = decode_version(encoded.value)
        if found < OLDEST_RUNTIME:
            raise DriverTooOld(
                "hipRuntimeGetVersion",
                encoded.value,
                ".".join(map(str, found)),
                ".".join(map(str, OLDEST_RUNTIME)),
                "its hipMemSetAccess fails on reservations with allocations of different size",
            )

    def _call(self, name: str, *arguments: object, wanted: int | None = None) -> None:
        """Call, and raise unless it succeeded; `wanted` as in `check`."""
        self.check(name, getattr(self._library, name)(*arguments), wanted)


def decode_version(encoded: int) -> tuple[int, int]:
    """(major, minor) of what hipRuntimeGetVersion says: 71260850 is 7.12, 100060850 is 10.0."""
    major, rest = divmod(encoded, 10_000_000)
    return major, rest // 100_000


def _load_runtime() -> ctypes.CDLL:
    """The copy that this process has loaded, such as torch's own, before any other: handles and
    the current device belong to a copy."""
    problems: list[str] = []
    for name in (*_loaded_copies(), _LIBRARY, f"{_LIBRARY}.7"):
        try:
            library = ctypes.CDLL(name)
            for function, arguments in _SIGNATURES.items():
                getattr(library, function).argtypes = arguments
            for function in ("hipGetErrorName", "hipGetErrorString"):
                getattr(library, function).argtypes = (c_int,)
                getattr(library, function).restype = c_char_p
        except (OSError, AttributeError) as error:
            # Not there, or too old to have one of the functions.
            problems.append(str(error))
        else:
            return library
    raise DriverError(f"dlopen {_LIBRARY}", -1, "; ".join(problems))


def _loaded_copies() -> list[str]:
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = dict.fromkeys(fields[5] for fields in lines if len(fields) > 5)
    return [path for path in paths if Path(path).name.startswith(_LIBRARY)]
