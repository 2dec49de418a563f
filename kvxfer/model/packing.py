"""Sequences of one forward pass, packed into one row: which token goes where, who reads what.

Facts relied on (torch 2.13 CPU, measured on 7 linear shapes at 1 and 2 threads; asserted again by
the tests): the rows of an fp32 linear layer come out in three classes by their number, {1},
{2, 3} and {4 or more, seen up to 256}, and are bit-identical within a class. So every row count
here is padded to at least 4, which makes a sequence's bits independent of its batch. Experts of a
mixture see other row counts; such models keep equal tokens, not equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import ModelError
from kvxfer.model.sampling import SampleSpec

MIN_ROWS: Final = 4
NULL_BLOCK: Final = 0

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a forward pass."""

    tokens: Sequence[int]
    """New tokens; their KV is written."""
    start: int
    """Position of tokens[0]; KV of everything before it is in the cache."""
    block_table: Sequence[int]
    """Blocks from position 0 on; covers start + len(tokens) tokens, may be longer."""
    sample: SampleSpec | None = None
    """How to choose the token that follows; None: none is wanted."""

    def __post_init__(self) -> None:
        if not self.tokens or self.start < 0:
            raise ModelError(f"a step of {len(self.tokens)} tokens from position {self.start}")

    @property
    def end(self) -> int:
        """Position after the last new token: the KV length, and where the next token stands."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in the packed row: rows [row, row + num_rows) are its last `num_rows` positions
    of `kv_len`, whose KV lies at [kv_start, kv_start + kv_len) of what the cache gathers."""

    row: int
    num_rows: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """Index tensors of one forward pass over R rows, made once and shared by all layers."""

    spans: tuple[Span, ...]
    input_ids: torch.Tensor
    """[1, R]; the rows after the last span are dummies that write to the null block."""
    position_ids: torch.Tensor
    """[1, R]"""
    write_blocks: torch.Tensor
    """[R]: the block that row r's KV goes to."""
    write_slots: torch.Tensor
    """[R]: and the token within it."""
    read_blocks: torch.Tensor
    """Every span's block table, one after the other."""
    last_rows: torch.Tensor
    """Each span's last row, padded to 4 by repetition: the rows whose logits are wanted."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """Sliding window by layer; each layer's attention enters its own as it runs."""
    _masks: dict[tuple[Span, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, span: Span, window: int | None) -> torch.Tensor:
        """Bool [num_rows, kv_len]: a query sees itself, what precedes it, and of that only the
        last `window` positions, itself included. Made once a step for all layers."""
        found = self._masks.get((span, window))
        if found is None:
            device = self.read_blocks.device
            keys = torch.arange(span.kv_len, device=device)
            queries = keys[span.kv_len - span.num_rows :, None]
            found = keys <= queries
            if window is not None:
                found &= keys > queries - window
            self._masks[span, window] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """Index tensors of one decode step, one row a sequence. Their addresses and shapes stay when
    their contents change, so that work recorded over them can be repeated."""

    input_ids: torch.Tensor
    """[1, R]"""
    position_ids: torch.Tensor
    """[1, R]"""
    write_blocks: torch.Tensor
    """[R]; the null block for a padding row."""
    write_slots: torch.Tensor
    """[R]"""
    seq_lens: torch.Tensor
    """[R]: tokens whose KV a row reads, its own included; 0 for a padding row."""
    block_tables: torch.Tensor
    """[R, max_blocks], int32; what lies beyond seq_lens is never looked at."""
    last_rows: torch.Tensor
    """[R]: all rows."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """As PackedStep's."""
    pending: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """By layer: new keys, new values and the layer's view, from the cache to the attention."""


def blocks_read(step: SequenceStep, block_size: int) -> Sequence[int]:
    """The part of its block table that a step needs. Raises ModelError when it is too short."""
    num_blocks = -(-step.end // block_size)
    if len(step.block_table) < num_blocks:
        raise ModelError(
            f"{len(step.block_table)} blocks of {block_size} tokens for {step.end} tokens"
        )
    return step.block_table[:num_blocks]


def pack(
    steps: Sequence[SequenceStep],
    block_size: int,
    device: torch.device,
    min_rows: int = MIN_ROWS,
) -> PackedStep:
    """At least `min_rows` rows. Raises ModelError when a block table does not cover its step."""
    spans: list[Span] = []
    rows: list[tuple[int, int, int, int]] = []
    """(token, position, block, slot) of each row."""
    read_blocks: list[int] = []
    for step in steps:
        blocks = blocks_read(step, block_size)
        num_rows = len(step.tokens)
        spans.append(Span(len(rows), num_rows, len(read_blocks) * block_size, step.end))
        read_blocks.extend(blocks)
        for position, token in enumerate(step.tokens, step.start):
            block = step.block_table[position // block_size]
            rows.append((token, position, block, position % block_size))
    last_rows = [span.row + span.num_rows - 1 for span in spans]
    last_rows += last_rows[-1:] * (min_rows - len(last_rows))
    rows += [(0, 0, NULL_BLOCK, 0)] * (min_rows - len(rows))

    columns = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)
    return PackedStep(
        spans=tuple(spans),
        input_ids=columns[:1],
        position_ids=columns[1:2],
        write_blocks=columns[2],
        write_slots=columns[3],
        read_blocks=torch.tensor(read_blocks, device=device),
        last_rows=torch.tensor(last_rows, device=device),
    )
