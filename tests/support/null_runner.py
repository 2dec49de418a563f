"""A model runner without a model: it writes a pattern where a model would write KV, and derives
each next token from the KV that it reads back, so that wrong KV shows as wrong tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ModelError
from kvxfer.model.packing import SequenceStep
from kvxfer.transfer.digest import block_digests

VOCAB_SIZE = 97
HOLD_TIMEOUT_S = 20.0


class NullRunner:
    """Every element is a small integer of (token, position, layer, head, content): exact in
    float32, and different wherever a transfer could confuse two places.

    `hold()` makes the model thread stop before its next step until `release()`; with
    `fail_next` set, that step raises ModelError instead.
    """

    def __init__(self, spec: KVCacheSpec, views: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self.views = views
        self.fail_next = ""
        self.num_chunks = 0
        self.batch_sizes: list[int] = []
        self.is_closed = False
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def prefill_chunk(self, step: SequenceStep) -> int | None:
        self._wait()
        self.num_chunks += 1
        self._write(step)
        return None if step.sample is None else self._read(step)

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        self._wait()
        self.batch_sizes.append(len(steps))
        for step in steps:
            self._write(step)
        return [self._read(step) for step in steps]

    def close(self) -> None:
        self.is_closed = True
        self.release()

    def _wait(self) -> None:
        if not self._open.wait(HOLD_TIMEOUT_S):
            raise ModelError("held for too long: the test forgot to release")
        if self.fail_next:
            text, self.fail_next = self.fail_next, ""
            raise ModelError(text)

    def _write(self, step: SequenceStep) -> None:
        for offset, token in enumerate(step.tokens):
            entry, slot = divmod(step.start + offset, self.spec.block_size)
            block = step.block_table[entry]
            for layer, view in enumerate(self.views):
                view[block, :, slot, :] = pattern(self.spec, token, step.start + offset, layer)

    def _read(self, step: SequenceStep) -> int:
        """A function of every element of the sequence's KV so far."""
        total = 0
        for layer, view in enumerate(self.views):
            for position in range(step.start + len(step.tokens)):
                entry, slot = divmod(position, self.spec.block_size)
                found = view[step.block_table[entry], :, slot, :]
                total += int(found.double().sum().item()) * (position + 3 * layer + 1)
        return total % VOCAB_SIZE


def pattern(spec: KVCacheSpec, token: int, position: int, layer: int) -> torch.Tensor:
    """The KV of one token in one layer: [H, C]."""
    heads = torch.arange(spec.num_kv_heads).unsqueeze(1) * 11
    content = torch.arange(spec.content_dim).unsqueeze(0)
    return ((heads + content + token * 31 + position * 7 + layer * 101) % 241).float()


class Reference:
    """What a single process with plain memory makes of a prompt."""

    def __init__(self, spec: KVCacheSpec, prompt: Sequence[int], max_new_tokens: int) -> None:
        num_blocks = spec.num_blocks(len(prompt) + max_new_tokens)
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.content_dim)
        views = [torch.zeros(shape) for _ in range(spec.num_layers)]
        runner = NullRunner(spec, views)
        blocks = list(range(num_blocks))
        from kvxfer.model.sampling import SampleSpec

        first = runner.prefill_chunk(SequenceStep(prompt, 0, blocks, SampleSpec()))
        assert first is not None
        self.digests = block_digests(views, blocks, len(prompt))
        self.tokens = [first]
        while len(self.tokens) < max_new_tokens:
            position = len(prompt) + len(self.tokens) - 1
            step = SequenceStep(self.tokens[-1:], position, blocks, SampleSpec())
            self.tokens += runner.decode_step([step])
