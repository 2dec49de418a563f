"""What `kvxfer bench vllm` may be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvxfer.bench.vllm.connectors import CONNECTORS
from kvxfer.errors import UsageError
from kvxfer.model.tiny import MODEL_DIR

NEEDED_BLOCK = 32
"""vLLM's attention on a CPU takes multiples of it."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Options named as vLLM's are what `vllm serve` is given."""

    vllm_python: Path
    """The Python that has vLLM: an environment of its own (deploy/vllm.sh makes one)."""
    connector: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("kvxfer", "nixl")
    """What moves the KV, one after the other: kvxfer (KvxferConnector), nixl (NixlConnector)."""
    prompt_lengths: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (
        *(20, 33, 256, 1000),
        1920,
    )
    """In tokens."""
    runs: int = 5
    """Of each length, with each connector; no two prompts begin alike."""
    max_tokens: int = 16
    """Of an answer."""
    model: Path = MODEL_DIR
    """A trained one whose tokenizer makes a token of a byte or more: of untrained weights, equal
    tokens would prove nothing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_size: int = 32
    num_gpu_blocks_override: int = 256
    """Blocks of each engine's cache, on a CPU too."""
    max_model_len: int = 2048
    start_timeout_s: float = 600.0
    """Three processes an engine, each of which imports vLLM: a minute or two."""
    log_dir: Path | None = None
    """Keep the engines' logs here."""
    json: Path | None = None
    """Write the figures to this file."""

    def check(self) -> None:
        """Raises UsageError."""
        if not (self.vllm_python.is_file() and os.access(self.vllm_python, os.X_OK)):
            raise UsageError("vllm_python", str(self.vllm_python), "is no program")
        if not self.connector:
            raise UsageError("connector", "", "name at least one")
        for name in self.connector:
            if name not in CONNECTORS:
                raise UsageError("connector", name, f"must be one of {', '.join(CONNECTORS)}")
        for field in ("runs", "max_tokens", "num_gpu_blocks_override"):
            if getattr(self, field) < 1:
                raise UsageError(field, getattr(self, field), "must be at least 1")
        if self.block_size < 1 or self.block_size % NEEDED_BLOCK:
            raise UsageError("block_size", self.block_size, f"must be a multiple of {NEEDED_BLOCK}")
        self._check_lengths()

    def _check_lengths(self) -> None:
        if not self.prompt_lengths:
            raise UsageError("prompt_lengths", "", "name at least one")
        most = self.max_model_len - self.max_tokens
        room = (self.num_gpu_blocks_override - 1) * self.block_size - self.max_tokens
        for length in self.prompt_lengths:
            if not 2 <= length <= min(most, room):
                reason = f"must be 2 to {min(most, room)}: an answer of {self.max_tokens} follows"
                raise UsageError("prompt_lengths", length, reason)
