"""Everything a service does, in a random order and in random sizes up to its largest."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import torch

from kvxfer.bench.service_load import Request, SpeculativeService

KINDS = ("prefill", "decode", "speculate", "sample")
WEIGHTS = (20, 35, 35, 10)
MOST_PREFILLED = 16
"""New prompts that come in together at the most."""


class MixedLoad:
    """Operations over a service's sequences: the same ones from every `restart`."""

    def __init__(self, service: SpeculativeService, dtype: torch.dtype, device: str) -> None:
        self._service = service
        self._dtype = dtype
        self._device = device
        self.restart()

    def restart(self) -> None:
        """From the beginning: new prompts everywhere, the same as the last time."""
        self.operations = 0
        self._random = random.Random(self._service.shape.seed)
        self._digest = hashlib.blake2b(digest_size=16)
        self._begin(self._service.sequences)

    @property
    def digest(self) -> str:
        """32 hex digits over every token that came out since the restart."""
        return self._digest.hexdigest()

    def operation(self) -> str:
        """One more; its kind."""
        service, pick = self._service, self._random
        kind = pick.choices(KINDS, WEIGHTS)[0]
        if kind == "prefill":
            self._begin(self._some(min(MOST_PREFILLED, service.shape.sequences)))
        elif kind == "decode":
            sequences = self._with_room(self._some(service.shape.sequences), 1)
            service.decode(sequences)
            self._note(sequences)
        elif kind == "speculate":
            drafted = pick.randint(1, service.shape.draft_tokens)
            sequences = self._with_room(self._some(service.shape.sequences), drafted + 1)
            service.step(sequences, drafted)
            self._note(sequences)
        else:
            rows = self._size(service.shape.sequences * (service.shape.draft_tokens + 1))
            shape = (rows, service.vocab_size)
            service.sample(torch.randn(shape, dtype=self._dtype, device=self._device))
        self.operations += 1
        return kind

    def _size(self, most: int) -> int:
        """Any, and the largest more often than another."""
        return most if self._random.random() < 0.1 else self._random.randint(1, most)

    def _some(self, most: int) -> list[Request]:
        return self._random.sample(self._service.sequences, self._size(most))

    def _with_room(self, sequences: list[Request], tokens: int) -> list[Request]:
        """The same ones; those that are too long for so many tokens more begin anew."""
        limit = self._service.shape.max_tokens - tokens
        if full := [one for one in sequences if len(one.tokens) > limit]:
            self._begin(full)
        return sequences

    def _begin(self, sequences: Sequence[Request]) -> None:
        pick, longest = self._random, self._service.shape.prompt_tokens
        for one in sequences:
            vocabulary = self._service.vocab_size
            one.prompt = [pick.randrange(vocabulary) for _ in range(pick.randint(1, longest))]
        self._service.prefill(sequences)
        self._note(sequences)

    def _note(self, sequences: Sequence[Request]) -> None:
        last = ",".join(f"{len(one.tokens)}:{one.tokens[-1]}" for one in sequences)
        self._digest.update(last.encode())
