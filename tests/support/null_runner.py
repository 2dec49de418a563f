"""A model runner without a model: it writes a pattern where a model would write KV, and derives
each next token from the KV that it reads back, so that wrong KV shows as wrong tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from kvxfer.cache.footprint import decoder_start, has_encoder, kv_tokens, prompt_entries
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import KvxferError, ModelError, NotFinite
from kvxfer.model.groups import Place
from kvxfer.model.packing import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.digest import block_digests

VOCAB_SIZE = 97
HOLD_TIMEOUT_S = 20.0
DECODER_START = 3


class NullRunner:
    """Every element is a small integer of (token, position, group, layer, head, content): exact in
    float32, and different wherever a transfer could confuse two places. It reads what a model with
    such groups would: of a group with a window, only the window.

    `hold()` makes the model thread stop before its next step until `release()`; with `fail_next`
    set, that step raises it instead.
    """

    def __init__(
        self, specs: Sequence[KVCacheSpec], views: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self.specs = specs
        self.views = views
        self.fail_next: KvxferError | str = ""
        self.num_chunks = 0
        self.batch_sizes: list[int] = []
        self.is_closed = False
        self._open = threading.Event()
        self._open.set()
        self._layers_open = threading.Event()
        self._layers_open.set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()
        self._layers_open.set()

    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None:
        self._wait()
        self.num_chunks += 1
        lengths = self._lengths(step.end, len(step.tokens))
        for group, spec in enumerate(self.specs):
            is_decoders = has_encoder(self.specs) and spec.kind is not GroupKind.CROSS
            start, tokens = (0, [DECODER_START]) if is_decoders else (step.start, step.tokens)
            for layer in range(spec.num_layers):
                self._write(group, layer, step.tables[group], start, tokens)
                if on_written is not None:
                    on_written(Place(group, layer))
                    self._pause_between_layers()
        return None if step.sample is None else self._read(step, lengths)

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        self._wait()
        self.batch_sizes.append(len(steps))
        for step in steps:
            for group, spec in enumerate(self.specs):
                for layer in range(spec.num_layers if spec.kind is not GroupKind.CROSS else 0):
                    self._write(group, layer, step.tables[group], step.start, step.tokens)
        tokens: list[int | None] = []
        problems = {}
        for index, step in enumerate(steps):
            try:
                tokens.append(self._read(step, self._lengths(step.end, step.num_encoder_tokens)))
            except ModelError as error:
                tokens.append(None)
                problems[index] = str(error)
        if problems:
            raise NotFinite(problems, tokens)
        return [token for token in tokens if token is not None]

    def close(self) -> None:
        self.is_closed = True
        self.release()

    def _wait(self) -> None:
        if not self._open.wait(HOLD_TIMEOUT_S):
            raise ModelError("held for too long: the test forgot to release")
        if self.fail_next:
            error, self.fail_next = self.fail_next, ""
            raise ModelError(error) if isinstance(error, str) else error

    def _lengths(self, end: int, num_encoder_tokens: int) -> list[int]:
        """Tokens of KV in each group after a step that ends at position `end`."""
        if not has_encoder(self.specs):
            return [end] * len(self.specs)
        is_prefill = end == num_encoder_tokens
        own = 1 if is_prefill else end
        return [num_encoder_tokens if spec.kind is GroupKind.CROSS else own for spec in self.specs]

    def _pause_between_layers(self) -> None:
        """While `hold_layers` is set, until it is not: layers travel meanwhile."""
        if not self._layers_open.wait(HOLD_TIMEOUT_S):
            raise ModelError("held for too long: the test forgot to release")

    def hold_layers(self) -> None:
        """Stop after each chunk's first layer until `release()`."""
        self._layers_open.clear()

    def _write(
        self, group: int, layer: int, table: BlockTable, start: int, tokens: Sequence[int]
    ) -> None:
        spec = self.specs[group]
        for position, token in enumerate(tokens, start):
            entry, slot = divmod(position, spec.block_size)
            block = table.at(entry)
            kv = pattern(spec, token, position, 100 * group + layer)
            self.views[group][layer][block, :, slot, :] = kv

    def _read(self, step: SequenceStep, lengths: Sequence[int]) -> int:
        """A function of every element that the newest token sees."""
        total = 0
        for group, (spec, length) in enumerate(zip(self.specs, lengths, strict=True)):
            for layer, view in enumerate(self.views[group]):
                for position in range(spec.first_seen(length - 1), length):
                    entry, slot = divmod(position, spec.block_size)
                    found = view[step.tables[group].at(entry), :, slot, :]
                    weight = position + 3 * layer + 17 * group + 1
                    seen = found.double().sum().item()
                    if not math.isfinite(seen):  # as the model says of its logits
                        raise ModelError(f"the KV of position {position} adds up to {seen}")
                    total += int(seen) * weight
        return total % VOCAB_SIZE


def pattern(spec: KVCacheSpec, token: int, position: int, layer: int) -> torch.Tensor:
    """The KV of one token in one layer: [H, C]."""
    heads = torch.arange(spec.num_kv_heads).unsqueeze(1) * 11
    content = torch.arange(spec.content_dim).unsqueeze(0)
    return ((heads + content + token * 31 + position * 7 + layer * 101) % 241).float()


class Reference:
    """What a single process with plain memory, in which every token has a place of its own, makes
    of a prompt."""

    def __init__(
        self, specs: Sequence[KVCacheSpec], prompt: Sequence[int], max_new_tokens: int
    ) -> None:
        lengths = kv_tokens(specs, len(prompt), max_new_tokens)
        tables, views = [], []
        for spec, length in zip(specs, lengths, strict=True):
            num_blocks = spec.num_blocks(length)
            shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.content_dim)
            dtype = getattr(torch, spec.dtype)
            views.append([torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)])
            tables.append(BlockTable(range(num_blocks)))
        runner = NullRunner(specs, views)
        first = runner.prefill_chunk(SequenceStep(prompt, 0, tables, SampleSpec()))
        assert first is not None
        self.digests: list[str] = []
        filled = kv_tokens(specs, len(prompt), 0)
        for group, kept in enumerate(prompt_entries(specs, len(prompt))):
            held = filled[group] - kept.start * specs[group].block_size
            self.digests += block_digests(views[group], tables[group].ids(kept), max(0, held))
        self.tokens = [first]
        start = decoder_start(specs, len(prompt))
        num_encoder = len(prompt) if has_encoder(specs) else 0
        while len(self.tokens) < max_new_tokens:
            position = start + len(self.tokens) - 1
            step = SequenceStep(self.tokens[-1:], position, tables, SampleSpec(), num_encoder)
            self.tokens += runner.decode_step([step])
