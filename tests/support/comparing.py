"""Answers of a HostEngine, next to those of another and of transformers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.models import GREEDY, HostEngine, HostSequence

from kvxfer.model import ModelInfo, SampleSpec

if TYPE_CHECKING:
    import torch

NEW_TOKENS = 24
BLOCK_SIZE = 16


def block_lists(prompts: Sequence[Sequence[int]], first: int = 1) -> list[list[int]]:
    """Disjoint blocks that hold each prompt and its answer, ids descending."""
    found = []
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS + 1) // BLOCK_SIZE)
        found.append(list(range(first, first + count))[::-1])
        first += count
    return found


def run(
    engine: HostEngine,
    prompts: Sequence[Sequence[int]],
    chunk: int = 32,
    sample: SampleSpec = GREEDY,
    batch: int = 1,
) -> list[HostSequence]:
    """Prefill all, then decode in batches of `batch`; the sequences with their answers."""
    sequences = [
        engine.prefill(prompt, blocks, chunk, sample)
        for prompt, blocks in zip(prompts, block_lists(prompts), strict=True)
    ]
    for start in range(0, len(sequences), batch):
        engine.decode(sequences[start : start + batch], NEW_TOKENS, sample)
    return sequences


def assert_same(
    engine_a: HostEngine,
    sequences_a: Sequence[HostSequence],
    engine_b: HostEngine,
    sequences_b: Sequence[HostSequence],
) -> None:
    """Equal tokens and, bit by bit, equal KV."""
    import torch

    for a, b in zip(sequences_a, sequences_b, strict=True):
        assert a.tokens == b.tokens
        for layer, (kv_a, kv_b) in enumerate(zip(engine_a.kv(a), engine_b.kv(b), strict=True)):
            assert torch.equal(kv_a, kv_b), f"KV of layer {layer}"


@dataclass
class Generated:
    answer: list[int]
    logits: torch.Tensor
    """[tokens, V]: what each was chosen from."""


def generate(info: ModelInfo, prompt: Sequence[int], num_tokens: int) -> Generated:
    """transformers' own greedy answer, without an end token."""
    import torch
    import transformers

    factory: Any = transformers.AutoModelForCausalLM
    if info.is_encoder_decoder:
        factory = transformers.AutoModelForSeq2SeqLM
    model = factory.from_pretrained(
        info.model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Generated(output.sequences[0, -num_tokens:].tolist(), torch.cat(output.logits))
