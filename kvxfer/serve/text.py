"""The text of a completion, as its tokens arrive."""

from __future__ import annotations

from kvxfer.model.tokenizer import Detokenizer, Tokenizer
from kvxfer.serve.completion import Completion


class TextStream:
    """One completion's text. `text` is all of it so far."""

    def __init__(self, prompt: str, completion: Completion, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.completion = completion
        self.text = ""
        self._detokenizer: Detokenizer = tokenizer.stream()
        self._num_pushed = 0
        self._is_over = False

    def new_text(self) -> str:
        """What was added since the last call; '' inside a character."""
        fresh = ""
        for token in self.completion.output[self._num_pushed :]:
            fresh += self._detokenizer.push(token)
            self._num_pushed += 1
        if self.completion.finished is not None and not self._is_over:
            self._is_over = True
            fresh += self._detokenizer.finish()
        self.text += fresh
        return fresh
