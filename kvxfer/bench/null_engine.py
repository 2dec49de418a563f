"""A worker's engine without a model, for what the control plane costs and whether it loses KV.

`--model none`: it writes nothing, always says the same token, and a connector that moves nothing
takes the place of the others'. `--model pattern`: it writes a pattern where a model would write KV
and derives each token from all the KV that it reads back, so that wrong KV shows as wrong tokens;
real connectors move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from kvxfer.bench.null_tokens import MAX_LEN, NUM_LAYERS, VOCAB_SIZE, levels, next_token
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.config import WorkerOptions
from kvxfer.errors import UsageError
from kvxfer.model.groups import Place
from kvxfer.model.loader import ModelInfo
from kvxfer.model.packing import SequenceStep
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.start import Progress, Start

NONE, PATTERN = "none", "pattern"
HEADS, HEAD_DIM = 2, 16


class SilentModel:
    """Computes nothing. Model thread, but for `bind`."""

    def bind(self, views: Sequence[Sequence[torch.Tensor]]) -> None:
        self.views = views[0]

    def warm_up(self, *_: object) -> None: ...

    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None:
        return None if step.sample is None else 1

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        return [1] * len(steps)

    def close(self) -> None: ...


class PatternModel(SilentModel):
    """Of one group of full attention, on the host."""

    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None:
        self._write(step)
        return None if step.sample is None else self._read(step)

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        for step in steps:
            self._write(step)
        return [self._read(step) for step in steps]

    def _write(self, step: SequenceStep) -> None:
        blocks, slots = self._places(step.tables[0], range(step.start, step.end))
        for layer, view in enumerate(self.views):
            values = torch.tensor(levels(step.tokens, step.start, layer), dtype=view.dtype)
            view[blocks, :, slots, :] = values[:, None, None]

    def _read(self, step: SequenceStep) -> int:
        blocks, slots = self._places(step.tables[0], range(step.end))
        found = [view[blocks, :, slots, :].flatten(1) for view in self.views]
        if any((rows != rows[:, :1]).any() for rows in found):
            return 0  # no token that `next_token` gives
        return next_token([rows[:, 0].int().tolist() for rows in found])

    def _places(self, table: BlockTable, tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.views[0].shape[2]
        blocks = [table.at(token // size) for token in tokens]
        return torch.tensor(blocks), torch.tensor([token % size for token in tokens])


class NullStart(Start):
    """As a worker of one rank on the host starts, but for the model."""

    def inspect(self) -> ModelInfo:
        name = self.options.model.name
        if name not in (NONE, PATTERN):
            raise UsageError("model", name, f"without a model it is {NONE} or {PATTERN}")
        return ModelInfo(Path(name), "null", "no model", MAX_LEN, VOCAB_SIZE, (), name * 8)

    def load(self, dtype: str | None) -> tuple[KVCacheSpec, ...]:
        model = SilentModel() if self.info.model_dir.name == NONE else PatternModel()
        self.model = self.runner = model  # type: ignore[assignment]
        self.weights = 0
        block = self.options.block_size
        return (KVCacheSpec(NUM_LAYERS, HEADS, HEAD_DIM, HEAD_DIM, "float32", block),)


class NothingConnector(Connector):
    """Every transfer ends at once, and no byte moves. For `none` alone: what arrives is wrong."""

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        self._tickets = 0
        self._ended: list[TicketResult] = []

    def register(self, regions: Sequence[Region]) -> None: ...

    def deregister(self, regions: Sequence[Region]) -> None: ...

    def describe(self, regions: Sequence[Region]) -> bytes:
        return b""

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None: ...

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        self._tickets += 1
        self._ended.append(TicketResult(self._tickets))
        return self._tickets

    def poll(self) -> list[TicketResult]:
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, peer: str) -> None: ...

    def close(self) -> None: ...


def start_null_engine(
    options: WorkerOptions,
    connectors: Mapping[str, type[Connector]],
    incarnation: str,
    progress: Progress,
    initiates: Direction,
) -> Engine:
    """As `start_engine`."""
    if options.model.name == NONE:
        connectors = {"nothing": NothingConnector}
    return start_engine(
        options, connectors, incarnation, progress, initiates=initiates, kind=NullStart
    )
