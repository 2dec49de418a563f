"""What a run measures: options become trials, each of one kind. Checked before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvxfer.bench.connectors.lanes import Lane, lanes_of
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.connectors.report import Kind
from kvxfer.bench.connectors.shapes import ShapePair, shapes_of
from kvxfer.bench.connectors.values import (
    chunk_of,
    count_of,
    doubling,
    ends_of,
    listed,
    one_of,
    size_of,
)
from kvxfer.bench.transfer_shapes import capacity_for
from kvxfer.errors import UsageError
from kvxfer.transfer.connector import Direction

DEFAULT_BLOCK_SIZES, DEFAULT_BATCH_SIZES = "4KiB,64KiB,1MiB", "1,16"
DIRECTIONS = {"WRITE": Direction.PUSH, "READ": Direction.PULL}
MEMORIES = {"DRAM": "cpu", "VRAM": "cuda"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A source's and a target's cache: what trials may share."""

    shapes: ShapePair
    capacity: int
    """Blocks of each cache, all of them committed; the null block is among them."""
    chunk_bytes: int
    """Of the largest chunks; 0: one plain allocation."""
    devices: tuple[str, str]
    """The source's and the target's."""


@dataclass(frozen=True, slots=True)
class Trial:
    kind: Kind
    lane: Lane
    setting: Setting

    @property
    def direction(self) -> Direction:
        return DIRECTIONS[self.kind.operation]

    @property
    def size_bytes(self) -> int:
        """That a transfer moves."""
        return self.kind.batch * self.setting.shapes.block_bytes


@dataclass(frozen=True, slots=True)
class Sweep:
    trials: tuple[Trial, ...]
    """Those of one setting and connector lie side by side."""
    problems: tuple[str, ...]
    """What is left out, and why."""
    settings: dict[str, str | int | float]
    """That runs must have in common to be compared."""

    @property
    def devices(self) -> list[str]:
        """All that are used, each once."""
        return sorted({device for trial in self.trials for device in trial.setting.devices})


def sweep_of(options: ConnectorsOptions, num_gpus: int) -> Sweep:
    """Raises UsageError. `num_gpus`: that this machine has."""
    for name in ("num_iter", "num_layers", "num_kv_heads"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    for name in ("warmup_iter", "bar"):
        if not getattr(options, name) >= 0:
            raise UsageError(name, getattr(options, name), "must be at least 0")
    lanes, problems = lanes_of(options.connectors, options.backend, is_far=bool(options.peer))
    modes = listed("modes", options.modes, one_of("direct", "staged"))
    chosen = [lane for lane in lanes if lane.mode in modes]
    if not chosen:
        raise UsageError("modes", options.modes, "none of the connectors goes that way")
    memories = _memories(options, num_gpus)
    gpus = _gpus(options, num_gpus, memories)
    trials = list(_trials(options, chosen, memories, gpus))
    measured = {trial.lane.name for trial in trials}
    chunks = listed("chunk_sizes", options.chunk_sizes, chunk_of)
    for lane in chosen:
        if all(lane.can_move(chunk) for chunk in chunks):
            continue
        reason = f"{lane.name} maps the chunks of memory that grows: fixed memory has none"
        if options.connectors and lane.name not in measured:
            raise UsageError("chunk_sizes", options.chunk_sizes, reason)
        problems.append(f"{lane.name}: fixed memory not measured: it has no chunks to map")
    settings: dict[str, str | int | float] = {
        "num_iter": options.num_iter,
        "warmup_iter": options.warmup_iter,
        "check_consistency": int(options.check_consistency),
        "num_layers": options.num_layers,
        "num_kv_heads": options.num_kv_heads,
        "total_buffer_size": options.total_buffer_size or "twice what moves",
        "peer": "another machine" if options.peer else "this machine",
        "gpus": ",".join(gpus) if any(memory == "VRAM" for pair in memories for memory in pair)
        else "",
    }  # fmt: skip
    return Sweep(tuple(trials), tuple(problems), settings)


def sizes_of(options: ConnectorsOptions) -> tuple[list[int], list[int]]:
    """Block sizes in bytes, and batch sizes. Raises UsageError."""
    if (options.start_block_size or options.max_block_size) and options.block_sizes:
        raise UsageError("block_sizes", options.block_sizes, "or a start and a maximum: not both")
    if (options.start_batch_size or options.max_batch_size) and options.batch_sizes:
        raise UsageError("batch_sizes", options.batch_sizes, "or a start and a maximum: not both")
    blocks = listed("block_sizes", options.block_sizes or DEFAULT_BLOCK_SIZES, size_of)
    if options.start_block_size or options.max_block_size:
        first = size_of("start_block_size", options.start_block_size or options.max_block_size)
        last = size_of("max_block_size", options.max_block_size or options.start_block_size)
        blocks = doubling("max_block_size", first, last)
    batches = listed("batch_sizes", options.batch_sizes or DEFAULT_BATCH_SIZES, count_of)
    if options.start_batch_size or options.max_batch_size:
        for name in ("start_batch_size", "max_batch_size"):
            if getattr(options, name) < 0:
                raise UsageError(name, getattr(options, name), "must be at least 1")
        start = options.start_batch_size or 1
        batches = doubling("max_batch_size", start, options.max_batch_size or start)
    return blocks, batches


def _memories(options: ConnectorsOptions, num_gpus: int) -> list[tuple[str, str]]:
    """The initiator's and the target's, as nixlbench calls them."""
    default = "VRAM" if num_gpus else "DRAM"
    sides = [
        listed(name, getattr(options, name) or default, one_of("DRAM", "VRAM"))
        for name in ("initiator_seg_type", "target_seg_type")
    ]
    for name, memories in zip(("initiator_seg_type", "target_seg_type"), sides, strict=True):
        if "VRAM" in memories and not num_gpus:
            raise UsageError(name, "VRAM", "there is no GPU here")
    return [(ours, theirs) for ours in sides[0] for theirs in sides[1]]


def _gpus(
    options: ConnectorsOptions, num_gpus: int, memories: Sequence[tuple[str, str]]
) -> list[str]:
    if not options.devices:
        return ["cuda:0", "cuda:1" if num_gpus > 1 and not options.peer else "cuda:0"]
    if not any("VRAM" in pair for pair in memories):
        raise UsageError("devices", options.devices, "are GPUs, and no memory is VRAM")
    found = options.devices.split(",")
    known = {f"cuda:{index}" for index in range(num_gpus)}
    if len(found) != 2 or not known.issuperset(found):
        reason = f"must be two of {', '.join(sorted(known)) or 'no GPUs'}, the initiator's first"
        raise UsageError("devices", options.devices, reason)
    return found


def _trials(
    options: ConnectorsOptions,
    lanes: Sequence[Lane],
    memories: Sequence[tuple[str, str]],
    gpus: Sequence[str],
) -> Iterator[Trial]:
    blocks, batches = sizes_of(options)
    operations = listed("op_type", options.op_type, one_of(*DIRECTIONS))
    chunks = listed("chunk_sizes", options.chunk_sizes, chunk_of)
    ends = ends_of(options.layouts, options.tensor_parallel_sizes)
    for memory, lane, one, chunk, block in itertools.product(memories, lanes, ends, chunks, blocks):
        if not lane.can_move(chunk):
            continue
        shapes = shapes_of(block, one, options.num_layers, options.num_kv_heads)
        capacity = _capacity(options, shapes, max(batches))
        for operation, batch in itertools.product(operations, batches):
            devices = [
                gpu if kind == "VRAM" else "cpu" for kind, gpu in zip(memory, gpus, strict=True)
            ]
            if operation == "READ":
                devices.reverse()
            kind = Kind(
                connector=lane.name,
                operation=operation,
                mode=lane.mode,
                initiator_memory=memory[0],
                target_memory=memory[1],
                layouts=str(one),
                block_bytes=block,
                batch=batch,
                chunk_bytes=chunk,
            )
            setting = Setting(shapes, capacity, chunk, (devices[0], devices[1]))
            yield Trial(kind, lane, setting)


def _capacity(options: ConnectorsOptions, shapes: ShapePair, batch: int) -> int:
    """Blocks of each of the two caches."""
    if not options.total_buffer_size:
        return capacity_for(batch)
    size = size_of("total_buffer_size", options.total_buffer_size)
    largest = max(shapes.source.spec.block_bytes, shapes.target.spec.block_bytes)
    if size // largest <= batch:
        reason = f"a transfer is of {batch} blocks of {largest} bytes, and there is a null block"
        raise UsageError("total_buffer_size", options.total_buffer_size, reason)
    return size // largest
