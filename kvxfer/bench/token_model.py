"""The model whose tokens are timed: a given one, or random weights of the usual KV shape."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.tiny import MODEL_DIR

LLAMA_SHAPE: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""Attention of Llama 3 8B: 128 KiB of KV a token in bfloat16, 2 MiB a block of 16 tokens. Its
vocabulary is smaller, and so may the MLPs be: neither has KV. Not tied: see `models.LLAMA_1B`.

With MLPs of 8,192, of the 14,336 that Llama 3 8B has, it comes to 4.8 billion parameters, 9.6 GB
to write and to load. A smaller model computes faster, so that what a hand-over adds weighs more.
"""


@dataclass(frozen=True, slots=True)
class TokenModel:
    """A model directory, looked at."""

    info: ModelInfo
    words: str
    """What it is, for the record."""


@contextmanager
def token_model(
    given: Path | None, device: str, intermediate_size: int, keep: Path | None = None
) -> Iterator[TokenModel]:
    """`given`; None: on the CPU the bundled model, on a GPU random weights, written to `keep`
    unless they are there, or to a temporary directory, which goes with the context. Raises
    UsageError."""
    if intermediate_size < 1:
        raise UsageError("intermediate_size", intermediate_size, "must be at least 1")
    with tempfile.TemporaryDirectory(prefix="kvxfer-tokens-") as scratch:
        if given is not None:
            directory, words = given, f"model {given.name}"
        elif device == "cpu":
            directory, words = MODEL_DIR, "the bundled model"
        else:
            fields = {**LLAMA_SHAPE, "intermediate_size": intermediate_size}
            directory = _written(keep or Path(scratch) / "model", fields)
            words = (
                "random weights, 32 layers, hidden size 4096, 32 heads, 8 KV heads of 128, "
                f"MLPs of {intermediate_size}, bfloat16"
            )
        info = inspect_model(directory)
        if info.is_encoder_decoder:
            raise UsageError("model", str(directory), "has an encoder: a decoder-only one is meant")
        yield TokenModel(info, words)


def _written(directory: Path, fields: Mapping[str, Any]) -> Path:
    """Raises UsageError where a model of another shape is kept."""
    from kvxfer.model.random_weights import write_random_model

    config = directory / "config.json"  # written last: what has one is whole
    if config.exists():
        kept = json.loads(config.read_text())
        if any(kept.get(name) != value for name, value in fields.items()):
            raise UsageError("keep_model", str(directory), "holds a model of another shape")
        print(f"using the random model in {directory}", flush=True)
        return directory
    start = time.monotonic()
    print(f"writing a random model to {directory} ...", flush=True)
    write_random_model(directory, fields)
    print(f"written in {time.monotonic() - start:.1f} s", flush=True)
    return directory


def random_prompts(info: ModelInfo, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Tokens of the vocabulary, but for those that end an answer."""
    source, ends = random.Random(seed), set(info.eos_token_ids)
    allowed = [token for token in range(info.vocab_size) if token not in ends]
    return [source.choices(allowed, k=num_tokens) for _ in range(count)]


def check_lengths(info: ModelInfo, prompt_tokens: int, new_tokens: int) -> None:
    """Raise UsageError for a sequence that is longer than the model takes."""
    total = prompt_tokens + new_tokens
    if total > info.max_model_len:
        reason = f"with {new_tokens} more come to {total}: the model takes {info.max_model_len}"
        raise UsageError("prompt_tokens", prompt_tokens, reason)
