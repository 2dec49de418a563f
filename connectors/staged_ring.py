"""The memory that the staged way registers with NIXL: how much, and that it is fixed.

Facts:
- Memory of torch's allocator is one cudaMalloc a large tensor, unless it was told to use
  expandable segments: those are growable memory, which NIXL pushes at 0.5 GB/s (read in torch's
  documentation and measured on growable memory of our own; not tried with torch's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from connectors.staged_messages import MAX_SLOTS
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.connector import MemoryWindow

STAGING_BYTES = "KVXFER_STAGING_BYTES"
"""Environment variable: bytes of the ring; by default 512 MiB on a GPU, 32 MiB on the host."""
STAGING_SLOTS = "KVXFER_STAGING_SLOTS"
"""Environment variable: slots in each direction. Fewer are larger: less to say for each byte."""
NUM_SLOTS: Final = {"cpu": 8, "cuda": 4}
_DEFAULT_BYTES: Final = {"cpu": 32 << 20, "cuda": 512 << 20}
"""On a GPU slots of 64 MiB, which cross NVLink in 175 µs: a piece takes some 70 µs of Python at
either end, and a kernel launch, whatever its size."""
_MOST_BYTES: Final = 1 << 40
_SLOT_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class RingShape:
    """`num_slots` to send from and as many to receive in."""

    slot_bytes: int
    num_slots: int

    @property
    def total_bytes(self) -> int:
        return 2 * self.num_slots * self.slot_bytes


def ring_shape(device: str, environ: Mapping[str, str]) -> RingShape:
    """Of a ring on torch's `device`. Raises UsageError for values that make no ring."""
    kind = device.partition(":")[0]
    kind = kind if kind in NUM_SLOTS else "cpu"
    default_bytes = _DEFAULT_BYTES[kind]
    num_slots = _number(environ, STAGING_SLOTS, NUM_SLOTS[kind], 1, MAX_SLOTS)
    step = 2 * num_slots * _SLOT_ALIGNMENT
    total_bytes = _number(environ, STAGING_BYTES, default_bytes, step, _MOST_BYTES)
    return RingShape(total_bytes // step * _SLOT_ALIGNMENT, num_slots)


def _number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name, "") or str(default)
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
        raise UsageError(name, text, f"must be a whole number from {least} to {most}")
    return int(text)


class RingMemory:
    """Fixed memory on a device, which lives as long as this object."""

    def __init__(self, device: str, size_bytes: int) -> None:
        # Here and not at the top: it takes seconds to import.
        import torch

        try:
            self._tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ConnectorError(f"no staging ring of {size_bytes} bytes: {first}") from error
        if device != "cpu" and _is_growable(self._tensor.data_ptr()):
            raise ConnectorError(
                "the staging ring came from an expandable segment, which NIXL pushes at 0.5 GB/s: "
                "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            )
        self.window = MemoryWindow(self._tensor.data_ptr(), size_bytes, device)


def _is_growable(address: int) -> bool:
    import torch

    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        start = segment["address"]
        if start <= address < start + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return False
