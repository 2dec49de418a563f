"""The bundled model: a byte-level Llama of 4.9 M parameters, its data card and its training code.

`MODEL_DIR` is a directory that transformers' `from_pretrained` and `tokenizers` load as it is.
Importing this package imports neither torch nor transformers.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).resolve().parent
"""Holds config.json, model.safetensors, tokenizer.json and excerpt.txt (held-out text)."""

__all__ = ["MODEL_DIR"]
