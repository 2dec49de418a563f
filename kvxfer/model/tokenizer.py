"""Text to tokens and back, on the `tokenizers` library alone.

Facts relied on (tokenizers 0.23, run): DecodeStream gives None while the text ends inside a
character, and what it gave so far is always a prefix of the whole decoded text, for invalid UTF-8
too (3,000 random byte sequences); it has no way to ask for what it still holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from kvxfer.errors import UsageError


class Tokenizer:
    """A directory's tokenizer.json. Safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises UsageError (field 'tokenizer') when tokenizer.json is missing or broken."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise UsageError("tokenizer", str(path), "no such file")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        # The library raises plain Exception, with the parser's message.
        except Exception as error:
            raise UsageError("tokenizer", str(path), str(error)) from error

    @property
    def vocab_size(self) -> int:
        """Added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a prompt, with the special tokens that the model wants around it, unless the
        text has them in it."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(tokens))

    def stream(self) -> Detokenizer:
        return Detokenizer(self._backend)


class Detokenizer:
    """One answer's text, token by token. One thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        """The text that `token` completes: '' inside a character, several when it ends some."""
        self._tokens.append(token)
        text = self._stream.step(self._backend, token) or ""
        self._sent += len(text)
        return text

    def finish(self) -> str:
        """What was held back because it ended inside a character. Call it once, at the end."""
        return self._backend.decode(self._tokens)[self._sent :]
