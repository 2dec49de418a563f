"""Room for small tables on the host, pinned, and on the device, used again and again.

Pinning memory takes longer than the copy of a small transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvxfer.transfer.regions import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """Two tensors of one length, int64; the same one where the device is the host."""

    host: torch.Tensor
    device: torch.Tensor
    words: Int64Array
    """The host's, as numpy writes them: quicker for so little."""


class UploadPool:
    """Owns what nobody has taken. One thread calls it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._spare: list[Upload] = []

    def put(self, table: Int64Array) -> Upload:
        """`table`, on its way to the front of `device` on the current stream. The caller gives the
        room back once nothing reads it any more."""
        size = len(table)
        fitting = [one for one in self._spare if len(one.host) >= size]
        if fitting:
            room = min(fitting, key=lambda one: len(one.host))
            self._spare.remove(room)
        else:
            room = self._make(1 << max(0, size - 1).bit_length())
        room.words[:size] = table
        if room.device is not room.host:
            room.device[:size].copy_(room.host[:size], non_blocking=True)
        return room

    def give_back(self, room: Upload) -> None:
        self._spare.append(room)

    def _make(self, num_words: int) -> Upload:
        self._spare.clear()  # larger room does for smaller tables too
        if self._device.type == "cpu":
            both = torch.empty(num_words, dtype=torch.int64)
            return Upload(both, both, both.numpy())
        host = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        return Upload(host, torch.empty_like(host, device=self._device), host.numpy())
