"""How `peer` moves bytes between mapped memory: on the host in slices, on a GPU by a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from connectors.host_copy import copy_host
from kvxfer.errors import ConnectorError
from kvxfer.transfer.boxes import Box

SLICE_BYTES: Final = 64 << 20
"""What is copied on the host in one turn of the transfer thread: 6–8 ms."""
PROGRAMS_ELSEWHERE: Final = 48
"""Saturate NVLink (370 of 396 GB/s) and take little from what else the GPU does."""
PROGRAMS_A_PROCESSOR: Final = 4
"""Within one GPU there is more to saturate."""


class Copier(ABC):
    """One thread calls it. Handles of copies are opaque."""

    place: str
    """Which memory of this host: 'host', or a GPU by its UUID."""
    has_own_turns = False
    """Whether bytes move between calls, too."""

    @abstractmethod
    def begin_turn(self) -> None:
        """A new turn of the transfer thread."""

    @abstractmethod
    def start(self, boxes: Sequence[Box], src_base: int, dst_base: int, place: str) -> Any:
        """Copy from memory at `place` to ours; ConnectorError if it cannot be started."""

    @abstractmethod
    def is_finished(self, copy: Any) -> bool:
        """Whether all bytes are at their destination. Raises ConnectorError when it failed."""

    @abstractmethod
    def is_at_rest(self, copy: Any) -> bool:
        """Whether no byte of it moves any more; what has not moved yet need not move."""

    @abstractmethod
    def warm_up(self) -> None:
        """Take now what the first copy would take of the device."""


@dataclass(slots=True)
class _HostCopy:
    slices: Iterator[Box]
    src_base: int
    dst_base: int


class HostCopier(Copier):
    """Copies within `is_finished`, first come, first served."""

    place = "host"

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._left = 0

    def begin_turn(self) -> None:
        self._left = self._slice_bytes

    def start(self, boxes: Sequence[Box], src_base: int, dst_base: int, place: str) -> _HostCopy:
        return _HostCopy(sliced(boxes, self._slice_bytes), src_base, dst_base)

    def is_finished(self, copy: _HostCopy) -> bool:
        while self._left > 0:
            box = next(copy.slices, None)
            if box is None:
                return True
            copy_host([box], copy.src_base, copy.dst_base)
            self._left -= box.total_bytes
        return False

    def is_at_rest(self, copy: _HostCopy) -> bool:
        return True

    def warm_up(self) -> None:
        """Nothing is kept between copies."""


class DeviceCopier(Copier):
    """One kernel a transfer, on a stream of its own."""

    has_own_turns = True

    def __init__(self, device: str) -> None:
        # Here and not at the top: both take seconds to import and are of no use without a GPU.
        import torch

        from connectors.gather import GpuCopier

        found = torch.cuda.get_device_properties(device)
        self.place = str(found.uuid)
        self._programs_here = PROGRAMS_A_PROCESSOR * found.multi_processor_count
        self._copier = GpuCopier(device, PROGRAMS_ELSEWHERE)

    def begin_turn(self) -> None:
        """The device has turns of its own."""

    def start(self, boxes: Sequence[Box], src_base: int, dst_base: int, place: str) -> Any:
        programs = self._programs_here if place == self.place else PROGRAMS_ELSEWHERE
        return self._copier.start(boxes, src_base, dst_base, programs)

    def is_finished(self, copy: Any) -> bool:
        return self._copier.is_finished(copy)

    def is_at_rest(self, copy: Any) -> bool:
        return self._copier.is_finished(copy)

    def warm_up(self) -> None:
        self._copier.warm_up()


def copier_for(device: str) -> Copier:
    """Of memory on torch's `device`. Raises ConnectorError for one that nothing here copies."""
    if device == "cpu":
        return HostCopier(SLICE_BYTES)
    if device.startswith("cuda"):
        return DeviceCopier(device)
    raise ConnectorError(f"peer copies no memory of device {device!r}")


def sliced(boxes: Sequence[Box], slice_bytes: int) -> Iterator[Box]:
    """The same runs in boxes of at most `slice_bytes`; longer runs are cut."""
    for box in boxes:
        bytes_per_start = box.num_runs and box.total_bytes // len(box.dst_starts)
        if box.total_bytes <= slice_bytes:
            yield box
        elif bytes_per_start <= slice_bytes:
            step = slice_bytes // bytes_per_start
            for first in range(0, len(box.dst_starts), step):
                yield _part(box, slice(first, first + step))
        elif box.extents:
            for index in range(box.extents[0]):
                yield from sliced([_inner(box, index)], slice_bytes)
        else:
            for first in range(0, box.run_bytes, slice_bytes):
                yield from sliced([_stretch(box, first, slice_bytes)], slice_bytes)


def _part(box: Box, starts: slice) -> Box:
    src, dst = box.src_starts[starts], box.dst_starts[starts]
    return Box(src, dst, box.extents, box.src_strides, box.dst_strides, box.run_bytes)


def _inner(box: Box, index: int) -> Box:
    """What `index` on the outermost axis selects."""
    src = box.src_starts + index * box.src_strides[0]
    dst = box.dst_starts + index * box.dst_strides[0]
    inner = box.extents[1:], box.src_strides[1:], box.dst_strides[1:]
    return Box(src, dst, *inner, box.run_bytes)


def _stretch(box: Box, first: int, size: int) -> Box:
    """Bytes [first, first + size) of each run."""
    size = min(size, box.run_bytes - first)
    return Box(box.src_starts + first, box.dst_starts + first, (), (), (), size)
