"""Prompts of given lengths, cut from the bundled text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvxfer.model.tiny import MODEL_DIR
from kvxfer.model.tokenizer import Tokenizer

STRIDE = 131
"""Tokens from where one prompt begins to where the next does; the text's length is no multiple."""


class Prompts:
    """No two of them begin alike, so that none finds another's KV in a prefix cache."""

    def __init__(self, model_dir: Path) -> None:
        tokenizer = Tokenizer.load(model_dir)
        self._special = tokenizer.encode("")
        """What the model wants before a text."""
        text = (MODEL_DIR / "excerpt.txt").read_text()
        self._text = tokenizer.encode(text, add_special_tokens=False)
        self._num_cut = 0

    def next(self, length: int) -> list[int]:
        """Of `length` tokens, at least as many as the special ones."""
        start = self._num_cut * STRIDE % len(self._text)
        self._num_cut += 1
        body = self._text[start:] + self._text[:start]
        while len(body) < length:
            body += body
        return [*self._special, *body[: length - len(self._special)]]

    def rounds(self, lengths: Sequence[int], runs: int) -> Iterator[list[int]]:
        """Each length, `runs` times over."""
        for _ in range(runs):
            yield from (self.next(length) for length in lengths)
