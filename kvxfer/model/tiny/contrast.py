"""Makes a trained model's words depend more on each of its recent KV blocks.

    python -m kvxfer.model.tiny.contrast --model DIR --corpus DIR --output DIR --seconds 480

A language model this small often says 'I will not see thee' whatever it has read, so a corrupted
cache could go unnoticed. First the attention is sharpened: queries and attention outputs are
scaled. Then each step prefills prompts from the training plays, lets the model go on greedily,
swaps each of the last four KV blocks for the neighbouring prompt's, and asks, beside the usual
loss on the prompts, that the swapped cache overrule the greedy choice somewhere: at the position
where it comes nearest to that, another token's logit must win by MARGIN. Swaps that change the
words already add no loss. A few minutes on a CPU do.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from kvxfer.model.tiny.corpus import read_corpus, windows
from kvxfer.model.tiny.swap import BLOCK_TOKENS, LAST_BLOCKS, forward, greedy, layers
from kvxfer.model.tiny.tokenizer import BOS_ID, MAX_LENGTH, VOCAB_SIZE, save_tokenizer
from kvxfer.model.tiny.train import mean_loss

MARGIN: Final = 1.0
ROWS: Final = 8
PROMPT_TOKENS: Final = (160, 320)
NEW_TOKENS: Final = 64
WEIGHT: Final = 0.5
"""Of the mean hinge, beside nats per byte."""


def sharpen(model: LlamaForCausalLM, query_scale: float, output_scale: float) -> None:
    """Makes every attention look at fewer places, and add more of what it finds there."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(query_scale)
            layer.self_attn.o_proj.weight.mul_(output_scale)


def copies(parts: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache that holds these keys and values, layer by layer."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(parts):
        cache.update(keys, values, index)
    return cache


def swapped_rows(part: Tensor, blocks: list[int]) -> Tensor:
    """Rows [len(blocks) * R, ...]: for each block, all rows with that block of the next row."""
    versions = []
    for block in blocks:
        start, end = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        other = part.roll(1, dims=0)[:, :, start:end]
        versions.append(torch.cat([part[:, :, :start], other, part[:, :, end:]], dim=2))
    return torch.cat(versions)


def hinge(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean hinge, and the share of rows whose greedy words change.

    `logits` [rows, T, vocab] come from the swapped caches; `chosen` [rows, T] is what the intact
    ones chose.
    """
    own = logits.gather(2, chosen[..., None])
    others = logits.scatter(2, chosen[..., None], -torch.inf).amax(2, keepdim=True)
    lead = (others - own).amax((1, 2))
    return F.relu(MARGIN - lead).mean(), (lead > 0).float().mean()


def losses(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nats per byte of prompts [ROWS, length], the hinge of their swaps, the share of changes."""
    cache = DynamicCache()
    logits = forward(model, ids, cache)
    nats = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1))
    parts = layers(cache)
    first = logits[:, -1].argmax(-1, keepdim=True)
    intact = copies([(keys.detach(), values.detach()) for keys, values in parts])
    words = greedy(model, intact, first, NEW_TOKENS).clone().repeat(LAST_BLOCKS, 1)
    last = ids.shape[1] // BLOCK_TOKENS
    blocks = list(range(last - LAST_BLOCKS, last))
    swapped = copies([(swapped_rows(k, blocks), swapped_rows(v, blocks)) for k, v in parts])
    loss, changed = hinge(forward(model, words[:, :-1], swapped), words[:, 1:])
    return nats, loss, changed


def draw_prompts(stream: Tensor, chance: random.Random) -> Tensor:
    """Prompts of one length from random places of the stream, <bos> first."""
    length = chance.randint(*PROMPT_TOKENS)
    starts = [chance.randrange(len(stream) - length) for _ in range(ROWS)]
    ids = torch.stack([stream[start : start + length] for start in starts]).long()
    ids[:, 0] = BOS_ID
    return ids


def tune(model: LlamaForCausalLM, stream: Tensor, options: argparse.Namespace) -> int:
    """Changes the model in place; the rate falls linearly over `seconds`. Returns the steps."""
    chance = random.Random(options.seed)
    adam = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0)
    start, step, share, loss_mean = time.monotonic(), 0, 0.0, 0.0
    while (progress := (time.monotonic() - start) / options.seconds) < 1:
        adam.param_groups[0]["lr"] = options.lr * min(1 - progress, (step + 1) / 10)
        nats, loss, changed = losses(model, draw_prompts(stream, chance))
        torch.autograd.backward(nats + WEIGHT * loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        share += changed.item()
        loss_mean += nats.item()
        if step % 10 == 0:
            print(f"step {step} changed {share / 10:.3f} train {loss_mean / 10:.3f}", flush=True)
            share = loss_mean = 0.0
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the words depend on each recent KV block.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--query-scale", type=float, default=3.0)
    parser.add_argument("--output-scale", type=float, default=1.3)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    sharpen(model, options.query_scale, options.output_scale)
    corpus = read_corpus(options.corpus, options.variants, options.seed)
    steps = tune(model, corpus.train, options)
    model.bfloat16().save_pretrained(options.output)
    save_tokenizer(options.output)
    inputs, targets = windows(corpus.held_out, MAX_LENGTH)
    tuned = LlamaForCausalLM.from_pretrained(options.output, dtype=torch.float32)
    print(json.dumps({"steps": steps, "held_out_loss": mean_loss(tuned, inputs, targets)}))


if __name__ == "__main__":
    main()
