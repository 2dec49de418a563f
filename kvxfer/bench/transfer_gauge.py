"""What a machine moves at best: one thread's memcpy, or one contiguous copy between GPUs."""

from __future__ import annotations

import ctypes
import time

import torch


class Gauge:
    """Copies a buffer of its own, kept until `close`, so that only the first copy of a size pays
    for its memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}

    def seconds(self, source: str, target: str, size_bytes: int) -> float:
        """How long `size_bytes` from device `source` to device `target` take, from the call to
        the last byte: copy engines between GPUs, memmove in this thread between host buffers. Of
        GPUs the second of two copies, since the first one wakes an idle device."""
        origin = self._buffer("source", source, size_bytes)
        goal = self._buffer("target", target, size_bytes)
        if source == target == "cpu":
            start = time.perf_counter()
            ctypes.memmove(goal.data_ptr(), origin.data_ptr(), size_bytes)
            return time.perf_counter() - start
        goal.copy_(origin)
        _synchronize(source, target)
        start = time.perf_counter()
        goal.copy_(origin)
        _synchronize(source, target)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buffers.clear()

    def _buffer(self, role: str, device: str, size_bytes: int) -> torch.Tensor:
        key = (role, device, size_bytes)
        if key not in self._buffers:
            self._buffers = {k: v for k, v in self._buffers.items() if k[2] == size_bytes}
            # Written, so that every page of the host is there.
            self._buffers[key] = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        return self._buffers[key]


def _synchronize(*devices: str) -> None:
    for device in set(devices):
        if device != "cpu":
            torch.cuda.synchronize(device)
