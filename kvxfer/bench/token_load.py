"""What an engine computes, over and over, while KV moves beside it. Model thread only.

Both loads are the same from every `reset` on, so that their tokens show whether what moves beside
them touched anything that it should not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvxfer.cache.table import BlockTable
from kvxfer.model.runner import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.worker.start import Runner


class Load(ABC):
    """One step after another."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""

    @abstractmethod
    def step(self) -> tuple[int, ...]:
        """Compute; the tokens that follow."""


class PrefillLoad(Load):
    """The first chunk of a prompt."""

    def __init__(self, runner: Runner, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        self._runner = runner
        self._step = SequenceStep(tokens, 0, [BlockTable(blocks)], SampleSpec())

    def reset(self) -> None:
        """Every step is the same."""

    def step(self) -> tuple[int, ...]:
        token = self._runner.prefill_chunk(self._step)
        assert token is not None, "it was asked for"
        return (token,)


class DecodeLoad(Load):
    """A batch of sequences, each of which begins again after `cycle_tokens`."""

    def __init__(
        self,
        runner: Runner,
        blocks: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        chunk_tokens: int,
        cycle_tokens: int,
    ) -> None:
        """`blocks` of each sequence hold its prompt and the cycle. Prefills the prompts."""
        self._runner = runner
        self._tables = [[BlockTable(ids)] for ids in blocks]
        self._context = len(prompts[0])
        self._cycle_tokens = cycle_tokens
        pairs = zip(self._tables, prompts, strict=True)
        self._first = tuple(_prefill(runner, *pair, chunk_tokens) for pair in pairs)
        self._last = self._first
        self._done = 0

    def reset(self) -> None:
        self._last, self._done = self._first, 0

    def step(self) -> tuple[int, ...]:
        position = self._context + self._done
        steps = [
            SequenceStep([token], position, table, SampleSpec())
            for token, table in zip(self._last, self._tables, strict=True)
        ]
        tokens = tuple(self._runner.decode_step(steps))
        self._last, self._done = tokens, self._done + 1
        if self._done == self._cycle_tokens:
            self.reset()
        return tokens


def _prefill(
    runner: Runner, table: list[BlockTable], prompt: Sequence[int], chunk_tokens: int
) -> int:
    token: int | None = None
    for start in range(0, len(prompt), chunk_tokens):
        chunk = prompt[start : start + chunk_tokens]
        token = runner.prefill_chunk(SequenceStep(chunk, start, table, SampleSpec()))
    assert token is not None, "a prompt has tokens"
    return token
