"""What the pattern of `null_engine` is, and the tokens that it comes to. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LAYERS = 2
VOCAB_SIZE = 1009
MAX_LEN = 4096


def levels(tokens: Sequence[int], start: int, layer: int) -> list[int]:
    """The number in every element of a token's KV in a layer, for tokens from `start` on: exact in
    float32, and different wherever a transfer could confuse two places."""
    return [
        (token * 31 + position * 7 + layer * 1013) % 65521
        for position, token in enumerate(tokens, start)
    ]


def next_token(found: Sequence[Sequence[int]]) -> int:
    """Of the levels of all tokens so far, layer by layer: 1 to VOCAB_SIZE - 1."""
    total = sum(
        level * (position + 3 * layer + 1)
        for layer, values in enumerate(found)
        for position, level in enumerate(values)
    )
    return 1 + total % (VOCAB_SIZE - 1)


def answer(prompt: Sequence[int], num_new: int) -> list[int]:
    """What a request without sampling comes to."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(next_token([levels(tokens, 0, layer) for layer in range(NUM_LAYERS)]))
    return tokens[len(prompt) :]
