"""What the demo sends: the user's prompts or three of its own, and a pair that makes decode grow.

The pair: a long *companion*, whose KV streams for a while, and *growers*, which need more blocks
than are free beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import UsageError
from kvxfer.model.tokenizer import Tokenizer

TINY_MODEL = Path(__file__).parent.parent / "model" / "tiny"
EXCERPT = TINY_MODEL / "excerpt.txt"
NUM_SHORT = 3
SHORT_CHARACTERS = 260


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    text: str
    tokens: list[int]


def read_prompts(texts: list[str], file: Path | None, tokenizer: Tokenizer) -> list[Prompt]:
    """The user's prompts: each --prompt, each non-empty line of --prompt-file; else our own."""
    for text in texts:
        if not text:
            raise UsageError("prompt", text, "is empty")
    if file is not None:
        texts = texts + _lines(file)
    if not texts:
        texts = _own_prompts()
    return [
        Prompt(f"prompt-{index}", text, tokenizer.encode(text))
        for index, text in enumerate(texts, 1)
    ]


def long_prompt(name: str, num_tokens: int, turn: int, tokenizer: Tokenizer) -> Prompt:
    """About `num_tokens` tokens of the excerpt, begun elsewhere for each `turn`."""
    excerpt = EXCERPT.read_text()
    start = turn * 997 % len(excerpt)
    text = (excerpt[start:] + excerpt) * 2
    tokens = tokenizer.encode(text)[:num_tokens]
    return Prompt(name, tokenizer.decode(tokens), tokens)


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("prompt_file", str(file), f"cannot be read: {error}") from error
    if not lines:
        raise UsageError("prompt_file", str(file), "holds no prompt")
    return lines


def _own_prompts() -> list[str]:
    """Passages of the excerpt, each cut where a line ends."""
    excerpt = EXCERPT.read_text()
    step = len(excerpt) // NUM_SHORT
    passages = []
    for index in range(NUM_SHORT):
        passage = excerpt[index * step :][:SHORT_CHARACTERS]
        passages.append(passage[passage.find("\n") + 1 : passage.rfind("\n") + 1])
    return passages
