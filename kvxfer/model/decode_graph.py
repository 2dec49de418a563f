"""Decode steps recorded once per batch size and repeated: CUDA graphs over the paged cache.

    fill   one step's tokens, positions, blocks, slots, lengths ──▶ tensors at fixed addresses
    repeat the recorded forward of the next larger batch size ──▶ logits at a fixed address

Facts relied on:
- the recorded work holds addresses: those tensors', the weights', and the views' base and strides,
  which growth of the cache never moves; a graph captured when each segment had one granule reads
  blocks that were committed later (run on an H200, driver 580, CUDA 13.0);
- what synchronises with the host cannot be captured, and a capture that fails leaves torch's
  allocator in doubt: such a model is found out in an ordinary run, with torch's sync debug mode;
- a kernel's first launch compiles and loads it, and a library's takes its workspace: both happen in
  the ordinary runs, on the stream that then captures;
- 'thread_local' capture lets other threads (a connector's) go on calling CUDA;
- graphs captured into one pool share its memory if they never run at the same time: the largest
  is captured first and the others fit into what it took. Only the logits outlive a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ModelError, UnsupportedModel
from kvxfer.model.choosing import likeliest
from kvxfer.model.groups import ModelGroups
from kvxfer.model.packing import (
    MIN_ROWS,
    NULL_BLOCK,
    DecodeGroup,
    DecodeStep,
    SequenceStep,
    Stretch,
    stretches_of,
)
from kvxfer.model.paged_cache import DecodeCache, Views

Work = Callable[[], None]
Recorder = Callable[[Work], Work]
"""Given work over tensors at fixed addresses, runs it at least once and returns what repeats it."""
Forward = Callable[[DecodeStep, DecodeCache], torch.Tensor]
"""A model's pass over R rows: logits [R, V], freshly made."""

PADDING_ROW: Final = (0, 0, 0, 0)
"""Token, position, slot and length of a row that belongs to no sequence; its blocks are null."""


class DecodeGraphs:
    """A model's decode step for up to `max_batch` sequences, recorded for each of `sizes` rows.

    Made in warm-up over the null block alone. One thread; one step at a time. Valid as long as the
    views' memory stays reserved at its addresses and the weights stay where they are.
    """

    def __init__(
        self,
        forward: Forward,
        views: Views,
        groups: ModelGroups,
        max_batch: int,
        max_tokens: int,
        record: Recorder,
    ) -> None:
        """`views` as ModelRunner.bind's; no sequence exceeds `max_tokens`. The null blocks must be
        backed. Raises UnsupportedModel when the model's decode step cannot be recorded."""
        self._groups = groups
        self._device = views[0][0].device
        self.max_batch = max_batch
        self.sizes = batch_sizes(max_batch)
        largest, num_groups = self.sizes[-1], len(groups.specs)
        width = len(PADDING_ROW) + num_groups
        self._columns = _Mirror((width, largest), torch.int64, self._device)
        """Rows as PADDING_ROW, then a block for each group."""
        self._tables = [
            _Mirror((largest, spec.num_blocks(max_tokens)), torch.int32, self._device)
            for spec in groups.specs
        ]
        self._rows = torch.arange(largest, device=self._device)
        self._best = torch.zeros((2, largest), dtype=torch.float64, device=self._device)
        self._logits: torch.Tensor | None = None
        self._replays: dict[int, Work] = {}
        for size in reversed(self.sizes):
            self._replays[size] = record(self._work(forward, views, size))

    def holds(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether `steps` are a decode step of a batch that was recorded."""
        return len(steps) <= self.max_batch and all(len(step.tokens) == 1 for step in steps)

    def run(self, steps: Sequence[SequenceStep]) -> tuple[torch.Tensor, torch.Tensor]:
        """[len(steps), V] logits and what is `likeliest` of them, on the device and valid until the
        next call; the KV is written.

        `steps` is held (see `holds`) and not empty. The work is queued on the current stream, and
        is over before the next call.
        Raises ModelError when a block table does not cover its step; then nothing was written.
        """
        size = next(size for size in self.sizes if size >= len(steps))
        self._fill(steps, size)
        self._replays[size]()
        assert self._logits is not None, "the recorder ran nothing"
        return self._logits[: len(steps)], self._best[:, : len(steps)]

    def _work(self, forward: Forward, views: Views, size: int) -> Work:
        tokens, positions, slots, lens, *blocks = self._columns.there[:, :size]
        parts = zip(self._groups.specs, blocks, self._tables, strict=True)
        step = DecodeStep(
            input_ids=tokens[None],
            position_ids=positions[None],
            seq_lens=lens,
            last_rows=self._rows[:size],
            groups=tuple(
                DecodeGroup(spec.window, block, slots, table.there[:size])
                for spec, block, table in parts
            ),
            places=self._groups.layers,
        )
        cache = DecodeCache(views, step)

        def work() -> None:
            logits = forward(step, cache)
            if self._logits is None:
                # The first run is of the largest size and precedes every capture.
                self._logits = torch.empty_like(logits)
            self._logits[:size].copy_(logits)
            self._best[:, :size].copy_(likeliest(logits))

        return work

    def _fill(self, steps: Sequence[SequenceStep], size: int) -> None:
        specs, block_size = self._groups.specs, self._groups.specs[0].block_size
        tables = [
            table_rows(spec, stretches_of(steps, group, len(specs)))
            for group, spec in enumerate(specs)
        ]
        columns = self._columns.words[:, :size]
        columns[:] = NULL_BLOCK
        columns[: len(PADDING_ROW)] = np.array(PADDING_ROW)[:, None]
        for row, step in enumerate(steps):
            blocks = [table[row, step.start // block_size] for table in tables]
            slot = step.start % block_size
            columns[:, row] = step.tokens[0], step.start, slot, step.end, *blocks
        self._columns.upload(len(self._columns.words))
        for mirror, table in zip(self._tables, tables, strict=True):
            mirror.words[: len(steps), : table.shape[1]] = table
            mirror.upload(len(steps))


class _Mirror:
    """A tensor at a fixed address and the host's copy of it, whose rows it takes over.

    Nothing waits for an upload: the host's rows stay as they are until the device has done what it
    was given (a step's caller waits for its logits).
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.there = torch.zeros(shape, dtype=dtype, device=device)
        is_apart = device.type != "cpu"
        self._here = torch.zeros(shape, dtype=dtype, pin_memory=True) if is_apart else self.there
        self.words: NDArray[np.int_] = self._here.numpy()

    def upload(self, num_rows: int) -> None:
        if self._here is not self.there:
            self.there[:num_rows].copy_(self._here[:num_rows], non_blocking=True)


def table_rows(spec: KVCacheSpec, stretches: Sequence[Stretch]) -> NDArray[np.int32]:
    """A row of block ids for each stretch, as wide as the longest needs; entries that its tokens
    do not see are the null block. Raises ModelError when a table does not cover its stretch."""
    width = max(spec.num_blocks(one.end) for one in stretches)
    rows = np.full((len(stretches), width), NULL_BLOCK, dtype=np.int32)
    for row, one in zip(rows, stretches, strict=True):
        entries = one.entries(spec)
        row[entries.start : entries.stop] = one.table.ids(entries)
    return rows


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Ascending powers of two from the fewest rows that any pass has, and what holds `max_batch`:
    the last is `max_batch` itself where it is no power of two."""
    sizes = []
    size = MIN_ROWS
    while size < max_batch:
        sizes.append(size)
        size *= 2
    return (*sizes, max(max_batch, MIN_ROWS))


class CudaRecorder:
    """Records work as CUDA graphs of `device` which share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        """Raises ModelError when Triton does not compile for the device here."""
        try:
            from kvxfer.model.paged_decode import is_interpreted
        except ImportError as error:
            raise ModelError(f"triton cannot be imported: {error}") from error
        if is_interpreted():
            raise ModelError("Triton's interpreter is on, and cannot be captured")
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run `work` twice, then capture it. Replaying queues it on the stream that is current.

        Raises UnsupportedModel when it synchronises with the host.
        """
        with torch.cuda.device(self._device):
            outer = torch.cuda.current_stream()
            self._stream.wait_stream(outer)
            with torch.cuda.stream(self._stream):
                work()
                with _no_host_synchronisation():
                    work()
            outer.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay


@contextmanager
def _no_host_synchronisation() -> Iterator[None]:
    """Raises UnsupportedModel where the body would wait for the device. Holds process-wide, so
    nothing else may use torch's CUDA meanwhile."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that the mode, a prototype, does not find everything.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise UnsupportedModel("its decode step waits for the GPU") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
