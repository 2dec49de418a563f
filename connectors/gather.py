"""Copies boxes of runs by address, on a GPU: a Triton kernel, and copy engines for very long runs.

    box     [E, extents…] runs of bytes, anywhere on either side (kvxfer/transfer/boxes.py)
    unit    1, 2, 4, 8 or 16 bytes: the widest that divides all addresses, strides and the run
    row     up to COLS units of one run; rows are numbered in the order of destinations
    tile    ROWS × COLS units: one step of a program. A run of a tile or more is one row a step

One kernel serves all boxes. What differs between them (extents, strides, sizes, the starts) is
read from a table in memory, and a row is taken apart with multiplications by magic numbers, so
that only the unit and COLS are compiled in: five variants for each unit at the default tile,
whatever blocks are cut in the middle. A source may be another GPU's memory that is mapped here:
tensors are made over it for the copy engines alone.

Facts relied on:
- 48 programs saturate NVLink (370 of 396 GB/s) on two H200s; within one GPU it takes hundreds.
- A pointer made of an integer loses what Triton knows of its alignment, and the load falls to 8
  bytes; with tl.multiple_of it is ld.global.cg.v2.b64, and all loads of a tile are issued before
  its first store, without a barrier from COLS = 32 up (read in PTX and SASS for sm_90, compiled
  without a GPU by Triton 3.6.0 and 3.7.1; 64 to 157 registers a thread).
- Triton compiles again for integer arguments that are 1, a multiple of 16, or beyond 32 bits: the
  kernel has none.
- A contiguous copy_ between tensors of one device is a cudaMemcpyAsync, whosever the pages are.
- Triton's interpreter runs when it is called: on the CPU a copy ends in `start`.

Importing this module needs torch and triton.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from connectors.box_shapes import (
    AXIS,
    HEADER,
    MAX_UNIT,
    PARAMETERS,
    LongRuns,
    Tiling,
    kernel_jobs,
    take_long_runs,
    unit_bytes,
    words_in,
)
from connectors.upload_pool import Upload, UploadPool
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.memory.extensible_tensor import tensor_over
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.regions import Int64Array

_WORDS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}


def _read_axis(at: tl.tensor) -> tuple[tl.tensor, ...]:
    extent, magic = tl.load(at).to(tl.uint32), tl.load(at + 1).to(tl.uint32)
    return extent, magic, tl.load(at + 2).to(tl.uint64), tl.load(at + 3), tl.load(at + 4)


def _divide(number: tl.tensor, extent: tl.tensor, magic: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Quotient, and the remainder as int64."""
    quotient = ((number.to(tl.uint64) * magic.to(tl.uint64)) >> shift).to(tl.uint32)
    return quotient, (number - quotient * extent).to(tl.int64)


_axis = triton.jit(_read_axis)
_divmod = triton.jit(_divide)


def _copy_boxes(
    table: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    HEADER: tl.constexpr,
    AXIS: tl.constexpr,
    PARAMETERS: tl.constexpr,
) -> None:
    """Program p copies tiles p, p + programs, … of each box of `table`: int64, the number of boxes,
    their parameters, their starts. A unit is UNIT bytes, WORDS of type WORD."""
    lines, words = tl.arange(0, ROWS), tl.arange(0, COLS * WORDS)
    for box in range(tl.load(table).to(tl.int32)):
        at = table + 1 + box * PARAMETERS
        num_rows, run_units = tl.load(at).to(tl.uint32), tl.load(at + 1)
        src_starts, dst_starts = table + tl.load(at + 2), table + tl.load(at + 3)
        extent0, magic0, shift0, src0, dst0 = _axis(at + HEADER)
        extent1, magic1, shift1, src1, dst1 = _axis(at + HEADER + AXIS)
        extent2, magic2, shift2, src2, dst2 = _axis(at + HEADER + 2 * AXIS)
        extent3, magic3, shift3, src3, dst3 = _axis(at + HEADER + 3 * AXIS)
        num_steps = ((num_rows + ROWS - 1) // ROWS).to(tl.int32)
        for step in range(tl.program_id(0), num_steps, tl.num_programs(0)):
            row = (step * ROWS + lines).to(tl.uint32)
            inside = row < num_rows
            rest, i3 = _divmod(row, extent3, magic3, shift3)
            rest, i2 = _divmod(rest, extent2, magic2, shift2)
            rest, i1 = _divmod(rest, extent1, magic1, shift1)
            start, i0 = _divmod(rest, extent0, magic0, shift0)
            start = start.to(tl.int64)
            src = tl.load(src_starts + start, mask=inside, other=0)
            dst = tl.load(dst_starts + start, mask=inside, other=0)
            src += i0 * src0 + i1 * src1 + i2 * src2 + i3 * src3
            dst += i0 * dst0 + i1 * dst1 + i2 * dst2 + i3 * dst3
            mask = words[None, :] < (tl.where(inside, run_units - i3 * COLS, 0) * WORDS)[:, None]
            source = (src * UNIT).to(tl.pointer_type(WORD), bitcast=True)
            target = (dst * UNIT).to(tl.pointer_type(WORD), bitcast=True)
            source = tl.multiple_of(source, UNIT)[:, None] + words[None, :]
            target = tl.multiple_of(target, UNIT)[:, None] + words[None, :]
            tl.store(target, tl.load(source, mask=mask, cache_modifier=".cg"), mask=mask)


_copy_kernel = triton.jit(_copy_boxes)


def is_interpreted() -> bool:
    """Whether the kernel runs in Triton's interpreter, in Python and on the host."""
    return not isinstance(_copy_kernel, triton.JITFunction)


@dataclass(slots=True)
class GpuCopy:
    """A started copy, what it still reads, and what went wrong once bytes may have moved.

    Without an event it ended in `start`.
    """

    uploads: list[Upload]
    event: torch.cuda.Event | None = None
    failure: ConnectorError | None = None


class GpuCopier:
    """Copies on a stream of its own, one after the other, on the device that runs the kernels.

    One thread at a time calls it. It waits for nothing: sources are complete before `start`, and
    both sides stay mapped and unwritten until the copy ended.
    """

    def __init__(
        self,
        device: str,
        max_programs: int = 48,
        tile_bytes: int = 64 << 10,
        num_warps: int = 8,
        engine_bytes: int = 8 << 20,
        stream_priority: int = 0,
    ) -> None:
        """`device` is torch's name. A program step moves `tile_bytes` (a power of two); runs of
        `engine_bytes` or more, joined where blocks adjoin, go to the copy engines.

        Raises UsageError, and ConnectorError where the device cannot be used.
        """
        wanted = "cpu" if is_interpreted() else "cuda"
        if torch.device(device).type != wanted:
            raise UsageError("device", device, f"the copy kernel runs on {wanted} here")
        if not 1 <= num_warps <= 32 or num_warps & (num_warps - 1):
            raise UsageError("num_warps", num_warps, "must be a power of two up to 32")
        self._max_programs = _programs(max_programs)
        self._tiling = Tiling(tile_bytes)
        self._num_warps = num_warps
        self._engine_bytes = engine_bytes
        self._stream: torch.cuda.Stream | None = None
        self._device = device
        if wanted == "cuda":
            with _translated("stream"):
                self._stream = torch.cuda.Stream(device, priority=stream_priority)  # type: ignore[no-untyped-call]
            self._device = str(self._stream.device)  # with its index
        self._current: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            # The stream's device is made current too. Made once: that takes longer than to enter.
            self._current = torch.cuda.stream(self._stream)
        self._pool = UploadPool(self._device)

    def start(
        self, boxes: Sequence[Box], src_base: int, dst_base: int, max_programs: int | None = None
    ) -> GpuCopy:
        """Copy each byte at `src_base` + offset to `dst_base` + offset: absolute addresses that
        the device can reach. `max_programs` overrides the constructor's for this copy.

        Raises ConnectorError, nothing moved.
        """
        programs = self._max_programs if max_programs is None else _programs(max_programs)
        copy = GpuCopy([])
        split = [take_long_runs(box, self._engine_bytes) for box in boxes]
        jobs = kernel_jobs([rest for _, rest in split], src_base, dst_base, self._tiling)
        with self._on_stream("copy"):
            tables = [self._upload(job.table, copy.uploads) for job in jobs]
            try:
                with _translated("copy"):
                    for long, _ in split:
                        self._start_engines(long, src_base, dst_base)
                    for job, table in zip(jobs, tables, strict=True):
                        self._launch(table, job.unit, job.cols, min(job.num_steps, programs))
            except ConnectorError as failure:
                copy.failure = failure  # what was launched before runs on
            copy.event = None if self._stream is None else self._stream.record_event()
        return copy

    def is_finished(self, copy: GpuCopy) -> bool:
        """Whether its bytes are at their destination. Raises ConnectorError once it ended
        otherwise; a device that failed is lost to this process."""
        with _translated("event query"):
            if copy.event is not None and not copy.event.query():  # type: ignore[no-untyped-call]
                return False
        while copy.uploads:
            self._pool.give_back(copy.uploads.pop())
        if copy.failure is not None:
            raise copy.failure
        return True

    def wait(self, copy: GpuCopy, timeout_s: float) -> None:
        """Return when it is finished; ConnectorError as above, and when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.is_finished(copy):
            if time.monotonic() > deadline:
                raise ConnectorError(f"a copy on {self._device} took more than {timeout_s} s")
            time.sleep(20e-6)

    def warm_up(self, boxes: Sequence[Box] = (), timeout_s: float = 120.0) -> None:
        """Compile every variant for units of 16 bytes and for those that `boxes` need between
        aligned bases, so that no transfer of parts of the same blocks has to. Moves nothing."""
        units = {MAX_UNIT, *(unit_bytes(box, 0, 0, MAX_UNIT) for box in boxes)}
        copy = GpuCopy([])
        with self._on_stream("warm-up"):
            empty = self._upload(np.zeros(2, dtype=np.int64), copy.uploads)
            for unit in sorted(units):
                for cols in self._tiling.cols(unit):
                    self._launch(empty, unit, cols, 1)
            copy.event = None if self._stream is None else self._stream.record_event()
        self.wait(copy, timeout_s)

    def _launch(self, table: torch.Tensor, unit: int, cols: int, programs: int) -> None:
        _copy_kernel[(programs,)](
            table,
            ROWS=self._tiling.rows(unit, cols),
            COLS=cols,
            WORDS=words_in(unit),
            WORD=_WORDS[unit],
            UNIT=unit,
            HEADER=HEADER,
            AXIS=AXIS,
            PARAMETERS=PARAMETERS,
            num_warps=self._num_warps,
        )

    def _start_engines(self, long: LongRuns, src_base: int, dst_base: int) -> None:
        for src, dst, size in zip(long.src_offsets, long.dst_offsets, long.sizes, strict=True):
            source = tensor_over(src_base + src, size, self._device)
            tensor_over(dst_base + dst, size, self._device).copy_(source, non_blocking=True)

    def _upload(self, table: Int64Array, uploads: list[Upload]) -> torch.Tensor:
        """`table` on the device; `uploads` receives what is in use until the copy ended."""
        uploads.append(self._pool.put(table))
        return uploads[-1].device

    @contextmanager
    def _on_stream(self, what: str) -> Iterator[None]:
        with _translated(what), self._current:
            yield


def _programs(wanted: int) -> int:
    if wanted < 1:
        raise UsageError("max_programs", wanted, "must be 1 or more")
    return wanted


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where an error of torch, CUDA or Triton becomes one of ours."""
    try:
        yield
    except (RuntimeError, TritonError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConnectorError(f"GPU {what}: {type(error).__name__}: {first}") from error
