"""What CUDA and HIP share: a chunk is made, mapped and opened as one transaction.

A vendor's file holds its calls, one method each (`VmmCalls`); everything that takes more than one
of them, and must undo some when a later one fails, stands here once (`GpuDriver`).

Facts this file relies on, the same for both vendors (each vendor's file says how it was checked):
- A handle type must be probed by a real allocation and export: attributes promise too much.
- Mapping grants no access; until access is set a touch is an error that the device never forgets.
- Whether a mapping can be for reading only is found out by the first that is asked for so: a
  refusal is in `refused`, and such mappings can be written then.
- Unmapping does not wait for work that still uses the range: the device is synchronised first.
- The memory of a released handle lives on while it is mapped somewhere, here or in a peer.
- Reserving, releasing, exporting and unmapping ask for no current device; synchronising and
  measuring do, and on HIP creating and importing too.
- The codes 0 (success), 1 (invalid value), 2 (out of memory), 800 (not permitted) and 801 (not
  supported), and the values of HandleTypes.
"""

from __future__ import annotations

import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import DriverError, OutOfMemory
from kvxfer.memory.driver import MemoryInfo, VmmDriver

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_PERMITTED = 800
NOT_SUPPORTED = 801

_CANNOT = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)
"""What a driver may say to a kind of access that it does not have."""


class HandleTypes(enum.IntFlag):
    """Ways in which other processes may be given an allocation."""

    NONE = 0
    POSIX_FD = 1
    FABRIC = 8


@dataclass(frozen=True, slots=True)
class AllocationKind:
    """What an allocation is asked to be capable of."""

    handle_types: HandleTypes
    gpu_direct: bool
    """Whether an RDMA card may reach it."""

    def __str__(self) -> str:
        return f"{self.handle_types.name}, gpu_direct={self.gpu_direct}"


KINDS = tuple(
    AllocationKind(handle_types, gpu_direct)
    for handle_types in (
        HandleTypes.FABRIC | HandleTypes.POSIX_FD,
        HandleTypes.POSIX_FD,
        HandleTypes.NONE,
    )
    for gpu_direct in (True, False)
)
"""Most capable first."""


class VmmCalls(ABC):
    """One device's calls of one vendor, each checked on its own.

    A call that fails raises DriverError with its name, code and text and has changed nothing;
    OutOfMemory where it is told the size of what it wants and the vendor says there is no room.
    """

    name: str
    """The vendor's interface: 'cuda' or 'hip'."""
    index: int
    """The device's number, the vendor's and torch's alike."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Make the device current for the calling thread, and then what it had before."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of the current device."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Of the current device."""

    @abstractmethod
    def properties(self, kind: AllocationKind) -> Any:
        """The vendor's description of an allocation of this kind."""

    @abstractmethod
    def granularity(self, properties: Any) -> int: ...

    @abstractmethod
    def reserve(self, size_bytes: int, alignment: int) -> int: ...

    @abstractmethod
    def free(self, address: int, size_bytes: int) -> None: ...

    @abstractmethod
    def create(self, size_bytes: int, properties: Any) -> int:
        """A handle, which the caller owns."""

    @abstractmethod
    def release(self, handle: int) -> None: ...

    @abstractmethod
    def map(self, address: int, size_bytes: int, handle: int) -> None: ...

    @abstractmethod
    def unmap(self, address: int, size_bytes: int) -> None: ...

    @abstractmethod
    def set_access(self, address: int, size_bytes: int, writable: bool) -> None:
        """Let this device, and no other, read and, if `writable`, write."""

    @abstractmethod
    def export(self, handle: int) -> int:
        """A new file descriptor, which the caller owns."""

    @abstractmethod
    def import_(self, fd: int) -> int:
        """A handle, which the caller owns; `fd` stays the caller's."""

    @abstractmethod
    def error_text(self, code: int) -> str: ...

    def check(self, name: str, code: int, wanted_bytes: int | None = None) -> None:
        """Raise unless call `name` succeeded. `wanted_bytes`: it asks for that much memory."""
        if code == OUT_OF_MEMORY and wanted_bytes is not None:
            raise OutOfMemory(name, code, wanted_bytes, self.memory_info().free_bytes)
        if code != SUCCESS:
            raise DriverError(name, code, self.error_text(code))


class GpuDriver(VmmDriver):
    """Chunks of one GPU's memory; the handle of a chunk is the vendor's.

    A call makes the device current for its own duration and then restores what the calling thread
    had: any thread may call, whatever device it works on. `kind` is the most capable kind of
    allocation that the device really gave, and `refused` why anything better was not to be had.
    """

    def __init__(self, calls: VmmCalls) -> None:
        """Raises DriverError, OutOfMemory among them, when not even a plain chunk can be had."""
        self.name = calls.name
        self.device = f"cuda:{calls.index}"  # torch's name for a GPU of either vendor
        self.refused: tuple[str, ...] = ()
        self._can_protect = True
        self._protected: set[int] = set()
        """Addresses of the chunks that are mapped for reading only."""
        self._calls = calls
        with calls.current():
            self.kind = self._probe()
            self._properties = calls.properties(self.kind)
            self.granularity = calls.granularity(self._properties)

    @property
    def can_export(self) -> bool:
        """Whether chunks can be handed to other processes as file descriptors."""
        return HandleTypes.POSIX_FD in self.kind.handle_types

    @property
    def gpu_direct(self) -> bool:
        """Whether an RDMA card may reach chunks."""
        return self.kind.gpu_direct

    def reserve(self, size_bytes: int) -> int:
        return self._calls.reserve(size_bytes, self.granularity)

    def commit(self, address: int, size_bytes: int) -> int:
        return self._map_new(
            address, size_bytes, lambda: self._calls.create(size_bytes, self._properties)
        )

    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        with ExitStack() as undo:
            with self._calls.current():
                self._calls.synchronize()
                self._calls.unmap(address, size_bytes)
                undo.callback(self._map_back, address, size_bytes, handle)
            # Last, since nothing undoes it: not even restoring the thread's device comes after.
            self._calls.release(handle)
            undo.pop_all()
        self._protected.discard(address)

    def export(self, handle: int, writable: bool = True) -> int:
        """The vendors know one kind of descriptor: `writable` changes nothing."""
        if not self.can_export:
            text = f"chunks of {self.device} cannot be exported: {'; '.join(self.refused)}"
            raise DriverError("export", NOT_SUPPORTED, text)
        return self._calls.export(handle)

    def import_(self, fd: int, address: int, size_bytes: int, writable: bool = True) -> int:
        return self._map_new(address, size_bytes, lambda: self._calls.import_(fd), writable)

    def free(self, address: int, size_bytes: int) -> None:
        self._calls.free(address, size_bytes)

    def memory_info(self) -> MemoryInfo:
        with self._calls.current():
            return self._calls.memory_info()

    def _map_new(
        self, address: int, size_bytes: int, make: Callable[[], int], writable: bool = True
    ) -> int:
        """`make` a handle, map it and open it, or leave nothing of either."""
        with ExitStack() as undo:
            with self._calls.current():
                handle = make()
                undo.callback(self._calls.release, handle)
                self._calls.map(address, size_bytes, handle)
                undo.callback(self._calls.unmap, address, size_bytes)
                is_protected = not writable and self._protect(address, size_bytes)
                if not is_protected:
                    self._calls.set_access(address, size_bytes, writable=True)
            undo.pop_all()
        if is_protected:
            self._protected.add(address)
        return handle

    def _protect(self, address: int, size_bytes: int) -> bool:
        """Open a mapping for reading only; False where the device cannot, of which the first time
        tells."""
        if not self._can_protect:
            return False
        try:
            self._calls.set_access(address, size_bytes, writable=False)
        except DriverError as error:
            if error.code not in _CANNOT:
                raise
            self._can_protect = False
            self.refused += (f"mappings for reading only: {error}",)
            return False
        return True

    def _map_back(self, address: int, size_bytes: int, handle: int) -> None:
        """Undo an unmapping; the handle still holds the chunk's contents."""
        with self._calls.current():
            self._calls.map(address, size_bytes, handle)
            self._calls.set_access(address, size_bytes, address not in self._protected)

    def _probe(self) -> AllocationKind:
        """The most capable kind of allocation that this device really gives."""
        for kind in KINDS:
            refusal = self._refusal(kind)
            if refusal is None:
                return kind
            self.refused += (f"{kind}: {refusal}",)
        raise DriverError("probe", NOT_SUPPORTED, "; ".join(self.refused))

    def _refusal(self, kind: AllocationKind) -> DriverError | None:
        """What keeps one granule of this kind from being made and handed out; leaves nothing."""
        properties = self._calls.properties(kind)
        with ExitStack() as undo:
            try:
                size = self._calls.granularity(properties)
                handle = self._calls.create(size, properties)
                undo.callback(self._calls.release, handle)
                if HandleTypes.POSIX_FD in kind.handle_types:
                    os.close(self._calls.export(handle))
            except OutOfMemory:
                raise
            except DriverError as error:
                return error
        return None
