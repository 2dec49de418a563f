"""Where prompts come from: the model's vocabulary, its longest, and a chat's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.serving.options import CHAT, ServingOptions
from kvxfer.bench.serving.prompts import Prompt, TraceLine, make_round
from kvxfer.errors import UsageError

SAFE_VOCAB = 256
"""Tokens that any model has."""


@dataclass(frozen=True, slots=True)
class Source:
    """Of one run."""

    options: ServingOptions
    trace: Sequence[TraceLine]
    vocab_size: int
    max_model_len: int
    """0: not known."""
    text_of: Callable[[Prompt], str]
    """What a chat says."""

    @classmethod
    def of(cls, options: ServingOptions, trace: Sequence[TraceLine]) -> Source:
        """Raises UsageError for a vocabulary that the model does not have."""
        if options.base_url:
            return cls(options, trace, options.random_vocab_size or SAFE_VOCAB, 0, words)
        from kvxfer.model.loader import inspect_model
        from kvxfer.model.tokenizer import Tokenizer

        info = inspect_model(Path(options.model))
        size = options.random_vocab_size or info.vocab_size
        if size > info.vocab_size:
            raise UsageError("random_vocab_size", size, f"the model has {info.vocab_size}")
        if options.endpoint != CHAT:
            return cls(options, trace, size, info.max_model_len, words)
        tokenizer = Tokenizer.load(Path(options.model))
        return cls(options, trace, size, 0, lambda one: tokenizer.decode(one.tokens))

    def round(self, index: int) -> list[Prompt]:
        """Its prompts. Raises UsageError where one is longer than the model takes."""
        prompts = make_round(self.options, self.trace, self.vocab_size, index)
        longest = max(len(one.tokens) + one.num_output for one in prompts)
        if not 0 < self.max_model_len < longest:
            return prompts
        field, hint = "random_input_len", "give shorter lengths"
        if self.trace:
            field, hint = "trace", f"--trace-scale {self.max_model_len / longest:.2g} may do"
        reason = f"is the longest prompt with its answer; the model takes {self.max_model_len}"
        raise UsageError(field, longest, f"{reason}: {hint}")


def words(prompt: Prompt) -> str:
    """For a chat, where no tokenizer is at hand: about as many tokens; the service counts them."""
    return " ".join(f"{token:x}" for token in prompt.tokens)
