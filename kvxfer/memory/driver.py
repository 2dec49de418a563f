"""The contract of a virtual-memory driver: addresses and physical memory, apart.

Facts about the drivers stand at the top of the file that implements each. All of them share:
a reservation costs no memory; touching an uncommitted address is a fault (SIGSEGV on the host, a
sticky context error on a GPU); every chunk is one physical allocation with one handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Physical memory of the device, in bytes, as this process may use it."""

    free_bytes: int
    total_bytes: int


class VmmDriver(ABC):
    """Reserve addresses, then back them with physical chunks.

    Any thread may call it; callers serialise calls on one reservation. Every method raises
    `DriverError` when the underlying call fails and leaves things as they were before.
    """

    name: str
    device: str
    """What torch calls the device the memory is on: 'cpu' or 'cuda:0'."""
    granularity: int
    """Every address and size below is a multiple of this many bytes."""
    can_retire: bool = False
    """Whether `retire` works here."""

    @abstractmethod
    def reserve(self, size_bytes: int) -> int:
        """Base address of `size_bytes` fresh, unbacked addresses; the caller owns them."""

    @abstractmethod
    def commit(self, address: int, size_bytes: int) -> int:
        """Create one chunk, map it readable and writable at `address`, return its handle.

        All or nothing. The chunk's bytes are zero on the host, undefined on a GPU.
        Raises `OutOfMemory` when there is no physical memory for it.
        """

    @abstractmethod
    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        """Unmap and release one whole chunk. The addresses stay reserved and fault again.

        The caller has made sure that nothing, local or remote, still uses the range.
        """

    def retire(self, address: int, size_bytes: int, handle: int) -> None:
        """`decommit` a chunk that a lost peer may still reach: its memory goes, but the addresses
        do not fault. What is written there is thrown away, until `bury` or the next `commit`.

        Only where `can_retire`.
        """
        raise NotImplementedError(f"{self.name} cannot retire memory")

    def bury(self, address: int, size_bytes: int) -> None:
        """Have retired addresses fault again: nobody can reach them any more."""
        raise NotImplementedError(f"{self.name} cannot retire memory")

    @abstractmethod
    def export(self, handle: int, writable: bool = True) -> int:
        """A new file descriptor of the chunk, which the caller owns and closes.

        Where the platform knows such descriptors, nobody can map a chunk writable through one that
        is not `writable`.
        """

    @abstractmethod
    def import_(self, fd: int, address: int, size_bytes: int, writable: bool = True) -> int:
        """Map another process's exported chunk at a reserved `address`; `fd` stays the caller's.

        The returned handle is given back with `decommit`, like that of an own chunk. One that is
        not `writable` is mapped for reading only, where the device can (`GpuDriver.refused`).
        """

    @abstractmethod
    def free(self, address: int, size_bytes: int) -> None:
        """Give back a reservation of which nothing is committed any more."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """What is free now, measured, not remembered."""
