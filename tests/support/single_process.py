"""The bundled model alone in this process, with plain memory: what services are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.commands import TINY_MODEL
from support.models import HostEngine

from kvxfer.model import inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.transfer.digest import block_digests

EPSILON = 1e-3
"""Of logits, in float32: closer ones may change places, as batches of another shape round
otherwise."""


class SingleProcess:
    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens of a block and of a prefill chunk, as in what is compared."""
        self._chunk = chunk
        self.runner = ModelRunner.load(inspect_model(TINY_MODEL), "cpu", "float32", 1)
        self.engine = HostEngine(self.runner, num_blocks=80, block_size=chunk)
        self._model: Any = None

    def answer(
        self, prompt: Sequence[int], max_tokens: int, num_told: int
    ) -> tuple[list[int], list[str]]:
        """`num_told` tokens, and the digests of the prompt's KV."""
        blocks = list(range(1, 2 + (len(prompt) + max_tokens) // self._chunk))
        sequence = self.engine.prefill(prompt, blocks, chunk=self._chunk)
        digests = block_digests(self.engine.views[0], blocks, len(prompt))
        self.engine.decode([sequence], max(0, num_told - 1))
        return sequence.answer, digests

    def gap(self, tokens: Sequence[int]) -> float:
        """Between the logits of the two likeliest tokens that follow."""
        import torch
        import transformers

        if self._model is None:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                TINY_MODEL, dtype=torch.float32
            ).eval()
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        return float(first - second)
