"""Tensors over a reservation, valid through growth, shrinking and sleep.

Facts (torch 2.11 with CUDA 13 on an H200, torch 2.13 on a CPU; tests/memory and tests/gpu):
- A storage made from a bare pointer touches no byte, so most of it may be uncommitted. torch has
  no public constructor that does this for CUDA memory which another device or process owns.
- `untyped_storage().nbytes()` is the size of the whole reservation. It says nothing about what is
  committed and is never used to derive a range: ranges come from the geometry and the buffer.
- torch never frees such a storage: it owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvxfer.errors import CacheError, CapacityExceeded
from kvxfer.memory.virtual_buffer import VirtualBuffer


class ExtensibleTensor:
    """`tensor` is 1-D over the whole reservation of `buffer`, committed or not.

    Reading or writing an uncommitted element is a fault (SIGSEGV, or a sticky error of the GPU
    context), and so is printing a tensor with one in it, in a log line too. All views share the
    buffer's addresses and must not be touched after its `close()`.
    """

    def __init__(self, buffer: VirtualBuffer, dtype: torch.dtype) -> None:
        if buffer.size_bytes % dtype.itemsize:
            raise CacheError(f"{buffer.size_bytes} bytes hold no whole number of {dtype}")
        raw = tensor_over(buffer.base_address, buffer.size_bytes, buffer.device)
        self.tensor = raw.view(dtype)

    def view(
        self, shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int = 0
    ) -> torch.Tensor:
        """Element (i, j, ...) at byte offset_bytes + i × strides_bytes[0] + j × ... of the buffer.

        Raises CacheError for an offset or stride that is negative or no multiple of the item's
        size, CapacityExceeded when an element would lie beyond the reservation.
        """
        itemsize = self.tensor.itemsize
        if len(shape) != len(strides_bytes) or min(shape, default=0) < 0:
            raise CacheError(f"shape {tuple(shape)} does not fit strides {tuple(strides_bytes)}")
        if any(step < 0 or step % itemsize for step in (offset_bytes, *strides_bytes)):
            raise CacheError(
                f"offset {offset_bytes} and strides {tuple(strides_bytes)} must be non-negative "
                f"multiples of {itemsize} bytes"
            )
        steps = zip(shape, strides_bytes, strict=True)
        last = offset_bytes + sum((extent - 1) * stride for extent, stride in steps)
        end = offset_bytes if 0 in shape else last + itemsize
        if end > self.tensor.nbytes:
            raise CapacityExceeded(f"view ends at byte {end} of {self.tensor.nbytes}")
        strides = [stride // itemsize for stride in strides_bytes]
        return self.tensor.as_strided(tuple(shape), strides, offset_bytes // itemsize)

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule over the whole reservation; `options` as in the array API standard."""
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.tensor.__dlpack_device__()
        return int(kind), int(index)


def tensor_over(address: int, size_bytes: int, device: str) -> torch.Tensor:
    """1-D uint8 tensor over [address, address + size_bytes) of `device`; owns nothing."""
    where = torch.device(device)
    storage = torch._C._construct_storage_from_data_pointer(address, where, size_bytes)
    empty = torch.empty(0, dtype=torch.uint8, device=where)
    return empty.set_(storage, 0, (size_bytes,), (1,))
