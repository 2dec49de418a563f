"""What a front serves, and within which bounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.errors import UsageError
from kvxfer.model.chat_template import ChatTemplate
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it."""

    name: str
    tokenizer: Tokenizer
    info: ModelInfo
    max_model_len: int
    """Tokens of the longest prompt and answer together; with an encoder of each of them."""
    chat_template: ChatTemplate | None = None
    """None: the model has none, and chat is refused."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        name: str = "",
        max_model_len: int | None = None,
        chat_template: Path | None = None,
    ) -> ServedModel:
        """`name` '' means the directory as it was given, like vLLM; `chat_template` replaces the
        model's own. Raises UsageError and UnsupportedModel."""
        info = inspect_model(model_dir)
        longest = info.max_model_len if max_model_len is None else max_model_len
        if not 1 <= longest <= info.max_model_len:
            reason = f"must be between 1 and the model's {info.max_model_len}"
            raise UsageError("max_model_len", longest, reason)
        return cls(
            name=name or str(model_dir),
            tokenizer=Tokenizer.load(model_dir),
            info=info,
            max_model_len=longest,
            chat_template=ChatTemplate.load(model_dir, chat_template),
        )

    def room(self, num_prompt_tokens: int) -> int:
        """Tokens that an answer to such a prompt may have; 0 or less when the prompt is too
        long."""
        if self.info.is_encoder_decoder:
            return self.max_model_len - 1 if num_prompt_tokens <= self.max_model_len else 0
        return self.max_model_len - num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the HTTP front. Raises UsageError for a bound that is none."""

    max_concurrent_requests: int = 1024
    """Completions on their way, all clients together: each prompt counts `n` times. Beyond it
    429."""
    max_n: int = 128
    """Answers to one prompt."""
    max_body_bytes: int = 8 << 20
    request_head_timeout_s: float = 30.0
    """For a client to say what it wants, from its connection or its last answer on."""
    request_body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    """A client that takes nothing for so long, while something waits for it, is gone."""
    health_timeout_s: float = 10.0
    """For the probe of /health."""
    health_cache_s: float = 5.0
    """How long the outcome of a probe is told again."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(name, getattr(self, name), "must be more than 0")
