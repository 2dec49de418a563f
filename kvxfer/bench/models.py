"""The models that are measured with: given ones, or random weights of a usual shape."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.loader import inspect_model
from kvxfer.model.tiny import MODEL_DIR

LLAMA_1B: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""The shape of Llama 3.2 1B, 32 KiB of KV a token in bfloat16. The output has a matrix of its own
(1.5 billion parameters in all): with tied ones random weights repeat the last token for ever, and
equal answers would prove little."""
DRAFT: Mapping[str, Any] = {
    **LLAMA_1B,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""A small model of the same vocabulary, to draft with: 145 million parameters."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Directories of the model that serves and of the one that drafts for it."""

    target: Path
    draft: Path


@contextmanager
def model_pair(
    model: Path | None, draft: Path | None, device: str, positions: int = 0
) -> Iterator[ModelPair]:
    """The directories given. None: on the CPU the bundled model, on a GPU random weights in a
    temporary directory (`positions` long, default 8,192), which goes with the context.

    Raises UsageError when the two have not the same vocabulary.
    """
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as scratch:
        root = Path(scratch)
        if model is not None:
            pair = ModelPair(model, draft or model)
        elif device == "cpu":
            pair = ModelPair(MODEL_DIR, draft or MODEL_DIR)
        else:
            longest = {"max_position_embeddings": positions} if positions else {}
            target = _written(root / "target", {**LLAMA_1B, **longest})
            pair = ModelPair(target, draft or _written(root / "draft", {**DRAFT, **longest}))
        sizes = [inspect_model(directory).vocab_size for directory in (pair.target, pair.draft)]
        if sizes[0] != sizes[1]:
            raise UsageError("draft", str(pair.draft), f"vocabularies of {sizes} tokens")
        yield pair


def _written(directory: Path, fields: Mapping[str, Any]) -> Path:
    from kvxfer.model.random_weights import write_random_model

    start = time.monotonic()
    write_random_model(directory, fields)
    print(f"wrote a random {directory.name} in {time.monotonic() - start:.1f} s", flush=True)
    return directory
