"""Measures whether the model's words depend on the KV cache that it was given.

    python -m kvxfer.model.tiny.swap --tries 20 --seed 1

A try cuts two prompts from held-out text, prefills both, and replaces one of the last four whole
16-token KV blocks of the first by the block of the second at the same index, in every layer. The
first new token comes from the intact prefill; the rest are decoded on the cache. A try counts when
the greedy continuation differs from the one on the intact cache. Both are rows of one batch, so
the arithmetic is the same for both.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvxfer.model.tiny import MODEL_DIR

BLOCK_TOKENS: Final = 16
LAST_BLOCKS: Final = 4
PROMPT_BYTES: Final = (200, 600)


@dataclass(frozen=True)
class Try:
    """One swap; `from_end` counts the prompt's whole blocks from its end, the last being 1."""

    prompt: str
    donor: str
    from_end: int


def draw_tries(text: str, tries: int, seed: int) -> Iterator[Try]:
    """Prompts of 200 to 600 bytes of ASCII text; the donor starts elsewhere, of the same length."""
    chance = random.Random(seed)
    for _ in range(tries):
        size = chance.randint(*PROMPT_BYTES)
        start, other = chance.sample(range(len(text) - size), 2)
        donor = text[other : other + size]
        yield Try(text[start : start + size], donor, chance.randint(1, LAST_BLOCKS))


def forward(model: torch.nn.Module, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Logits [rows, tokens, vocab]; the cache grows. By position: 5.24 renamed the argument."""
    logits: Tensor = model(ids, None, None, cache, use_cache=True).logits
    return logits


def layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [rows, KV heads, tokens, head size] of each layer; no copies."""
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def prefill(model: torch.nn.Module, ids: list[int]) -> tuple[DynamicCache, int]:
    """The prompt's cache, and the first new token."""
    cache = DynamicCache()
    return cache, int(forward(model, torch.tensor([ids]), cache)[0, -1].argmax())


@torch.no_grad()
def swapped(cache: DynamicCache, donor: DynamicCache, block: int) -> DynamicCache:
    """A cache of two rows: the intact one, and the one with block `block` of `donor`."""
    both = DynamicCache()
    span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    for index, (own, other) in enumerate(zip(layers(cache), layers(donor), strict=True)):
        keys, values = (part.repeat(2, 1, 1, 1) for part in own)
        keys[1, :, span], values[1, :, span] = (part[0, :, span] for part in other)
        both.update(keys, values, index)
    return both


@torch.no_grad()
def greedy(model: torch.nn.Module, cache: DynamicCache, first: Tensor, new_tokens: int) -> Tensor:
    """Token ids [rows, new_tokens], the first of which is `first` [rows, 1]."""
    tokens = [first]
    for _ in range(new_tokens - 1):
        tokens.append(forward(model, tokens[-1], cache)[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Swap KV blocks and compare what the model says.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--text", type=Path, default=MODEL_DIR / "excerpt.txt")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text(encoding="utf-8")
    changed: dict[int, list[bool]] = {place: [] for place in range(1, LAST_BLOCKS + 1)}
    for drawn in draw_tries(text, options.tries, options.seed):
        ids = tokenizer(drawn.prompt)["input_ids"]
        cache, first = prefill(model, ids)
        donor, _ = prefill(model, tokenizer(drawn.donor)["input_ids"])
        both = swapped(cache, donor, len(ids) // BLOCK_TOKENS - drawn.from_end)
        intact, other = greedy(model, both, torch.full((2, 1), first), options.new_tokens).tolist()
        changed[drawn.from_end].append(intact != other)
        print(json.dumps([tokenizer.decode(intact), tokenizer.decode(other)]), flush=True)
    by_place = {place: f"{sum(found)}/{len(found)}" for place, found in changed.items()}
    total = sum(map(sum, changed.values()))
    print(json.dumps({"changed": total, "tries": options.tries, "by_block_from_end": by_place}))


if __name__ == "__main__":
    main()
