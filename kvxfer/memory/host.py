"""Virtual memory on the host: reserved addresses backed by sealed memfds.

Facts this file relies on (Linux 6.18, x86-64; run by hand and by tests/memory):
- A PROT_NONE, MAP_NORESERVE mapping costs no memory and no page tables, whatever its size.
- posix_fallocate on a memfd allocates its pages, charged to the caller, and fails with an error
  where there are none; without it the first touch of a page that cannot be had is a SIGBUS.
- A MAP_FIXED mmap replaces what was there in one step. It is refused (ENOMEM) before it changes
  anything when the process holds vm.max_map_count mappings; each chunk is one mapping.
- A private, anonymous, MAP_NORESERVE mapping costs nothing until it is written to (reads find one
  shared page of zeros), so throw-away pages under retired addresses are free while nobody writes.
- MADV_DONTNEED keeps the pages of a shared memfd; they go with the last mapping and descriptor.
- A memfd opened anew through /proc/self/fd for reading only can be mapped for reading only (EACCES
  for more), by whoever it is sent to. That stops mistakes, not malice: with /proc and the owner's
  user id it can be opened for writing again. A seal against writing (F_SEAL_FUTURE_WRITE) would
  also keep the owner from mapping its own chunk a second time, as merging chunks does.
- memfds are not bounded by the size of /dev/shm, and F_SEAL_SHRINK keeps anyone, the exporter
  too, from cutting one short under a peer that has it mapped (which would be a SIGBUS there).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvxfer.errors import DriverError, OutOfMemory, UsageError
from kvxfer.memory.driver import MemoryInfo, VmmDriver
from kvxfer.memory.limits import HostMemory

DEFAULT_GRANULARITY = 64 * 1024

# Not in Python 3.11's mmap module; the same on x86-64 and arm64.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_UNBACKED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_HINTS = {
    errno.EMFILE: "each chunk is an open file: raise the process's limit (`ulimit -n`)",
    errno.ENFILE: "each chunk is an open file: raise the system's limit (sysctl fs.file-max)",
}


@dataclass(slots=True)
class _Reservation:
    """What was reserved and which chunks back it: MAP_FIXED asks nobody before it overwrites."""

    mapping: int
    mapped_bytes: int
    """What mmap gave: the reservation and up to a granule of padding on either side."""
    base: int
    size: int
    starts: list[int] = field(default_factory=list)
    """Addresses of the chunks, sorted."""
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Address of a chunk to its (size, fd)."""

    def is_free(self, address: int, size: int) -> bool:
        """Whether [address, address + size) lies within the reservation and touches no chunk."""
        index = bisect.bisect_left(self.starts, address)
        left = self.starts[index - 1] if index else self.base
        left_end = left + self.chunks[left][0] if index else self.base
        right = self.starts[index] if index < len(self.starts) else self.base + self.size
        return left_end <= address and address + size <= right

    def add(self, address: int, size: int, fd: int) -> None:
        bisect.insort(self.starts, address)
        self.chunks[address] = (size, fd)

    def remove(self, address: int) -> None:
        self.starts.remove(address)
        del self.chunks[address]


class HostDriver(VmmDriver):
    """Chunks of host memory; the handle of a chunk is its memfd's descriptor number.

    The granularity is a choice here. 64 KiB keeps a small cache's padding and its first block per
    segment small, and is still large enough that a segment's tail is cut into at most ten chunks
    below 64 MiB: each chunk costs a descriptor, a mapping and, later, a registered region, and no
    transfer descriptor may cross a chunk edge.
    """

    name = "host"
    device = "cpu"
    can_retire = True

    def __init__(self, granularity: int = DEFAULT_GRANULARITY) -> None:
        if granularity < mmap.PAGESIZE or granularity & (granularity - 1):
            reason = f"must be a power of two and a multiple of the page size {mmap.PAGESIZE}"
            raise UsageError("granularity", granularity, reason)
        self.granularity = granularity
        self._memory = HostMemory()
        self._reservations: dict[int, _Reservation] = {}

    def reserve(self, size_bytes: int) -> int:
        self._check_aligned("reserve", 0, size_bytes)
        # mmap aligns to pages only. The spare granule costs addresses and nothing else.
        mapped_bytes = size_bytes + self.granularity
        mapping = _mmap(0, mapped_bytes, _PROT_NONE, _UNBACKED, -1)
        base = -(-mapping // self.granularity) * self.granularity
        self._reservations[base] = _Reservation(mapping, mapped_bytes, base, size_bytes)
        return base

    def commit(self, address: int, size_bytes: int) -> int:
        reservation = self._vacancy("commit", address, size_bytes)
        free = self.memory_info().free_bytes
        if size_bytes > free:
            # Else the kernel would end some process, perhaps this one, to make room.
            raise OutOfMemory("commit", errno.ENOMEM, size_bytes, free)
        with ExitStack() as undo:
            fd = self._new_memfd(size_bytes)
            undo.callback(os.close, fd)
            _map_shared(address, size_bytes, fd)
            undo.pop_all()
        reservation.add(address, size_bytes, fd)
        return fd

    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        self._unmap("decommit", address, size_bytes, handle, _PROT_NONE)

    def retire(self, address: int, size_bytes: int, handle: int) -> None:
        self._unmap("retire", address, size_bytes, handle, _READ_WRITE)

    def bury(self, address: int, size_bytes: int) -> None:
        self._vacancy("bury", address, size_bytes)
        _mmap(address, size_bytes, _PROT_NONE, _UNBACKED | _MAP_FIXED, -1)

    def export(self, handle: int, writable: bool = True) -> int:
        if writable:
            with _translated("dup"):
                return os.dup(handle)
        with _translated("open"):
            return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)

    def import_(self, fd: int, address: int, size_bytes: int, writable: bool = True) -> int:
        reservation = self._vacancy("import_", address, size_bytes)
        with _translated("fstat"):
            actual = os.fstat(fd).st_size
        if actual != size_bytes:
            text = f"the descriptor holds {actual} bytes, {size_bytes} were announced"
            raise DriverError("import_", errno.EINVAL, text)
        with _translated("fcntl(F_GET_SEALS)"):
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise DriverError("import_", errno.EINVAL, "the memory is not sealed against shrinking")
        with ExitStack() as undo:
            own = self.export(fd)
            undo.callback(os.close, own)
            _map_shared(address, size_bytes, own, _READ_WRITE if writable else mmap.PROT_READ)
            undo.pop_all()
        reservation.add(address, size_bytes, own)
        return own

    def free(self, address: int, size_bytes: int) -> None:
        reservation = self._reservation("free", address, size_bytes)
        if (address, size_bytes) != (reservation.base, reservation.size) or reservation.chunks:
            raise _refused("free", address, size_bytes, "not a whole reservation without chunks")
        if _libc.munmap(reservation.mapping, reservation.mapped_bytes):
            raise _error("munmap", ctypes.get_errno())
        del self._reservations[address]

    def memory_info(self) -> MemoryInfo:
        with _translated("memory_info"):
            return self._memory.measure()

    def _unmap(
        self, call: str, address: int, size_bytes: int, handle: int, protection: int
    ) -> None:
        """Put unbacked addresses in the place of a chunk, and release it."""
        reservation = self._reservation(call, address, size_bytes)
        if reservation.chunks.get(address) != (size_bytes, handle):
            raise _refused(call, address, size_bytes, f"no chunk with handle {handle}")
        _mmap(address, size_bytes, protection, _UNBACKED | _MAP_FIXED, -1)
        reservation.remove(address)
        with _translated("close"):
            os.close(handle)

    def _new_memfd(self, size_bytes: int) -> int:
        """A memfd of `size_bytes` allocated and sealed bytes, or nothing."""
        with ExitStack() as undo:
            with _translated("memfd_create"):
                fd = os.memfd_create("kvxfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            with _translated("ftruncate"):
                os.ftruncate(fd, size_bytes)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
            except OSError as error:
                raise self._no_pages(error.errno or 0, size_bytes) from error
            with _translated("fcntl(F_ADD_SEALS)"):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            undo.pop_all()
        return fd

    def _no_pages(self, code: int, size_bytes: int) -> DriverError:
        if code in (errno.ENOMEM, errno.ENOSPC):
            free = self.memory_info().free_bytes
            return OutOfMemory("posix_fallocate", code, size_bytes, free)
        return _error("posix_fallocate", code)

    def _check_aligned(self, call: str, address: int, size_bytes: int) -> None:
        if size_bytes <= 0 or (address | size_bytes) % self.granularity:
            text = f"no positive multiple of the granularity {self.granularity}"
            raise _refused(call, address, size_bytes, text)

    def _reservation(self, call: str, address: int, size_bytes: int) -> _Reservation:
        # A copy: another thread may reserve meanwhile.
        for reservation in list(self._reservations.values()):
            end = reservation.base + reservation.size
            if reservation.base <= address and address + size_bytes <= end:
                return reservation
        raise _refused(call, address, size_bytes, "not within a reservation")

    def _vacancy(self, call: str, address: int, size_bytes: int) -> _Reservation:
        """The reservation around an aligned range in which nothing is committed yet."""
        self._check_aligned(call, address, size_bytes)
        reservation = self._reservation(call, address, size_bytes)
        if not reservation.is_free(address, size_bytes):
            raise _refused(call, address, size_bytes, "some of it is committed already")
        return reservation


def _map_shared(address: int, size_bytes: int, fd: int, protection: int = _READ_WRITE) -> None:
    # The pages exist: MAP_POPULATE only spares the first touch of each its minor fault.
    flags = mmap.MAP_SHARED | _MAP_FIXED | mmap.MAP_POPULATE
    _mmap(address, size_bytes, protection, flags, fd)


def _mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            text = f"{os.strerror(code)}: no more mappings (sysctl vm.max_map_count) or addresses"
            raise DriverError("mmap", code, f"{text} (`ulimit -v`) for this process")
        raise _error("mmap", code)
    return int(result)


def _error(call: str, code: int) -> DriverError:
    hint = f" ({_HINTS[code]})" if code in _HINTS else ""
    return DriverError(call, code, os.strerror(code) + hint)


def _refused(call: str, address: int, size_bytes: int, reason: str) -> DriverError:
    return DriverError(call, errno.EINVAL, f"[{address:#x}, +{size_bytes}): {reason}")


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """OSError of `call` as DriverError."""
    try:
        yield
    except OSError as error:
        raise _error(call, error.errno or 0) from error
