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

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError
from kvxfer.model.groups import ModelGroups, Place
from kvxfer.model.sampling import SampleSpec

MIN_ROWS: Final = 4
NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a forward pass."""

    tokens: Sequence[int]
    """New tokens; their KV is written."""
    start: int
    """Position of tokens[0]; KV of everything before it is in the cache."""
    tables: Sequence[BlockTable]
    """One for each group of the cache."""
    sample: SampleSpec | None = None
    """How to choose the token that follows; None: none is wanted."""
    num_encoder_tokens: int = 0
    """Decode steps of a model with an encoder: how many tokens its CROSS groups hold."""

    def __post_init__(self) -> None:
        if not self.tokens or self.start < 0:
            raise ModelError(f"a step of {len(self.tokens)} tokens from position {self.start}")

    @property
    def end(self) -> int:
        """Position after the last new token: the KV length, and where the next token stands."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in one group: rows [row, row + num_rows) of the pass are the last `num_rows` of
    the `kv_len` tokens that lie at [kv_start, kv_start + kv_len) of what the cache gathers.

    `kv_len` counts from the first token that the first row sees, not from the first of the block
    it lies in: what no row sees enters no arithmetic.
    """

    row: int
    num_rows: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupStep:
    """Index tensors of a pass over R rows in one group, shared by the group's layers."""

    spans: tuple[Span, ...]
    window: int
    """Tokens that a row sees, itself included; 0: all before it."""
    write_blocks: torch.Tensor
    """[R]: the block that row r's KV goes to; the null block for a dummy row."""
    write_slots: torch.Tensor
    """[R]: and the token within it."""
    read_blocks: torch.Tensor
    """The blocks that each span reads, one span after the other."""
    _masks: dict[Span, torch.Tensor] = field(default_factory=dict)

    def mask(self, span: Span) -> torch.Tensor:
        """Bool [num_rows, kv_len]: which keys a row sees. Made once a pass for all layers."""
        found = self._masks.get(span)
        if found is None:
            keys = torch.arange(span.kv_len, device=self.read_blocks.device)
            queries = keys[span.kv_len - span.num_rows :, None]
            found = keys <= queries
            if 0 < self.window < span.kv_len:
                found &= keys > queries - self.window
            self._masks[span] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """Index tensors of one forward pass over R rows, made once."""

    input_ids: torch.Tensor
    """[1, R]; the rows after the last span are dummies that write to the null block."""
    position_ids: torch.Tensor
    """[1, R]"""
    last_rows: torch.Tensor
    """The rows whose logits are wanted: each span's last, padded to 4 by repetition, or all."""
    groups: tuple[GroupStep, ...]
    places: Sequence[Place]
    """By layer: which group it belongs to, and which of its layers it is."""
    windows: dict[int, int] | None = None
    """In a probe, which knows no windows yet, what each layer's attention was given (0: none)."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Rows are the same in all groups."""
        return self.groups[0].spans


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """One group's part of a DecodeStep."""

    window: int
    write_blocks: torch.Tensor
    """[R]; the null block for a padding row."""
    write_slots: torch.Tensor
    """[R]"""
    block_tables: torch.Tensor
    """[R, max_blocks], int32; only entries that the row sees are ever looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """Index tensors of one decode step, one row a sequence. Their addresses and shapes stay when
    their contents change, so that work recorded over them can be repeated."""

    input_ids: torch.Tensor
    """[1, R]"""
    position_ids: torch.Tensor
    """[1, R]"""
    seq_lens: torch.Tensor
    """[R]: tokens before and at a row, seen or not; 0 for a padding row."""
    last_rows: torch.Tensor
    """[R]: all rows."""
    groups: tuple[DecodeGroup, ...]
    places: Sequence[Place]
    """As PackedStep's."""
    pending: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """By layer: new keys, new values and the layer's view, from the cache to the attention."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, end) of a sequence in one group, `table` its blocks."""

    table: BlockTable
    start: int
    end: int

    def entries(self, spec: KVCacheSpec) -> range:
        """The table's entries that hold what these tokens see, themselves included. Raises
        ModelError when the table has too few blocks to hold them at once."""
        first = spec.first_seen(self.start) // spec.block_size
        entries = range(first, spec.num_blocks(self.end))
        if len(entries) > len(self.table.blocks):
            raise ModelError(
                f"{len(self.table.blocks)} blocks of {spec.block_size} tokens for "
                f"{self.end - first * spec.block_size} tokens"
            )
        return entries


def stretches_of(steps: Sequence[SequenceStep], group: int, num_groups: int) -> list[Stretch]:
    """Each step's tokens in one group. Raises ModelError for a table too few or too many."""
    for step in steps:
        if len(step.tables) != num_groups:
            raise ModelError(f"{len(step.tables)} block tables for {num_groups} groups")
    return [Stretch(step.tables[group], step.start, step.end) for step in steps]


def index_group(
    spec: KVCacheSpec, stretches: Sequence[Stretch], device: torch.device, num_rows: int
) -> GroupStep:
    """One row a token, stretch after stretch, then dummies up to `num_rows`."""
    spans: list[Span] = []
    read_blocks: list[int] = []
    size = spec.block_size
    writes = np.zeros((2, num_rows), dtype=np.int64)
    writes[0] = NULL_BLOCK
    row = 0
    for one in stretches:
        entries = one.entries(spec)
        blocks = one.table.ids(entries)
        first = spec.first_seen(one.start)
        kv_start = len(read_blocks) * size + first - entries.start * size
        spans.append(Span(row, one.end - one.start, kv_start, one.end - first))
        read_blocks.extend(blocks)
        positions = np.arange(one.start, one.end)
        rows = slice(row, row + len(positions))
        writes[0, rows] = np.array(blocks)[positions // size - entries.start]
        writes[1, rows] = positions % size
        row = rows.stop
    there = torch.from_numpy(writes).to(device)
    return GroupStep(
        spans=tuple(spans),
        window=spec.window,
        write_blocks=there[0],
        write_slots=there[1],
        read_blocks=torch.tensor(read_blocks, device=device),
    )


def pack(
    steps: Sequence[SequenceStep],
    groups: ModelGroups,
    device: torch.device,
    min_rows: int = MIN_ROWS,
    all_rows: bool = False,
) -> PackedStep:
    """At least `min_rows` rows; logits are wanted of each step's last row, or of `all_rows`.
    Raises ModelError when a block table does not cover its step."""
    tokens = [token for step in steps for token in step.tokens]
    positions = [position for step in steps for position in range(step.start, step.end)]
    num_rows = max(min_rows, len(tokens))
    dummies = [0] * (num_rows - len(tokens))
    num_groups = len(groups.specs)
    parts = tuple(
        index_group(spec, stretches_of(steps, group, num_groups), device, num_rows)
        for group, spec in enumerate(groups.specs)
    )
    last_rows = [span.row + span.num_rows - 1 for span in parts[0].spans]
    last_rows += last_rows[-1:] * (min_rows - len(last_rows))
    wanted = list(range(num_rows)) if all_rows else last_rows
    columns = torch.tensor([tokens + dummies, positions + dummies], device=device)
    return PackedStep(
        input_ids=columns[:1],
        position_ids=columns[1:],
        last_rows=torch.tensor(wanted, device=device),
        groups=parts,
        places=groups.layers,
    )


def probe_step(num_layers: int, device: torch.device) -> PackedStep:
    """A single token at position 0 of a model whose groups are not known yet. Its layers' KV is
    attended as it is computed: it goes with a RecordingCache."""
    rows = torch.zeros(1, MIN_ROWS, dtype=torch.int64, device=device)
    one = GroupStep((Span(0, 1, 0, 1),), 0, rows[0], rows[0], rows[0, :1])
    places = [Place(0, layer) for layer in range(num_layers)]
    return PackedStep(rows, rows, rows[0], (one,), places, windows={})
