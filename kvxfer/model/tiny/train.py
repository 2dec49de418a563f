"""Trains the bundled model: bytes in, bytes out, on a folder of public-domain plays.

    python -m kvxfer.model.tiny.train --corpus DIR --output DIR --seed 7 --steps 2400

The schedule runs to its end at `--steps` or `--seconds`, whichever comes first. What is kept is the
moving average of the weights, as it was at the best held-out loss, rounded to bf16. The last line
printed is JSON: losses in nats per byte, measured on the bf16 weights.
"""

import argparse
import copy
import json
import math
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvxfer.model.tiny.corpus import Corpus, excerpt, read_corpus, windows
from kvxfer.model.tiny.muon import Muon
from kvxfer.model.tiny.tokenizer import (
    BOS_ID,
    EOS_ID,
    MAX_LENGTH,
    PAD_ID,
    VOCAB_SIZE,
    save_tokenizer,
)

CROP_LENGTHS: Final = (512, MAX_LENGTH)
"""Tokens a training row; every step draws one of them, so a step's shape is one of two."""

WARMUP: Final = 0.02
DECAY_FROM: Final = 0.35
"""Shares of the run: the learning rate rises until WARMUP, falls linearly to 0 from DECAY_FROM."""


@dataclass(frozen=True)
class Settings:
    """What a run is made of; `batch_tokens` is per step, `seconds` is wall time of training."""

    corpus: Path
    output: Path
    seed: int
    steps: int
    seconds: float
    batch_tokens: int
    variants: int
    dropout: float
    muon_lr: float
    adam_lr: float
    weight_decay: float
    eval_every: int
    compile: bool


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description="Train the bundled byte-level model.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *_gut.txt plays")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--variants", type=int, default=32, help="versions, renamed but the first")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--eval-every", type=int, default=200, help="steps between held-out losses")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    return Settings(**vars(parser.parse_args()))


def build_model() -> Any:
    """A fresh fp32 LlamaForCausalLM of 4.87 M parameters; seed torch before the call."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=568,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drops what the embedding and each residual branch put out, while the model is training."""

    def drop(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return F.dropout(output, rate, module.training)

    branches = [model.model.embed_tokens]
    for layer in model.model.layers:
        branches += [layer.self_attn.o_proj, layer.mlp.down_proj]
    for module in branches:
        module.register_forward_hook(drop)


class Crops:
    """Random crops of the training stream, each with <bos> in its first place."""

    def __init__(self, stream: Tensor, batch_tokens: int, seed: int) -> None:
        self._stream = stream
        self._batch_tokens = batch_tokens
        self._lengths = random.Random(seed)
        self._starts = torch.Generator(stream.device).manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            length = self._lengths.choice(CROP_LENGTHS)
            rows = max(1, self._batch_tokens // length)
            device, highest = self._stream.device, len(self._stream) - length
            starts = torch.randint(highest, (rows, 1), generator=self._starts, device=device)
            places = starts + torch.arange(length + 1, device=device)
            ids = self._stream[places].long()
            targets = ids[:, 1:].contiguous()
            inputs = ids[:, :-1].clone()
            inputs[:, 0] = BOS_ID
            yield inputs, targets


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().view(-1, VOCAB_SIZE), targets.reshape(-1))


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> float:
    """Loss over windows of one length, in the weights' own dtype, 16 windows a forward."""
    model.train(False)
    total = torch.zeros((), device=inputs.device)
    for rows, wanted in zip(torch.split(inputs, 16), torch.split(targets, 16), strict=True):
        total += loss_of(model, rows, wanted) * len(rows)
    return total.item() / len(inputs)


class Trainer:
    """Owns the model, its optimizers and its average; `train` returns when the schedule ends."""

    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = device
        self.model = build_model().to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        add_dropout(self.model, settings.dropout)
        self.forward = torch.compile(self.model, dynamic=False) if settings.compile else self.model
        matrices = list(self.model.model.layers.parameters())
        rest = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        rest += [p for p in matrices if p.ndim < 2]
        self.muon = Muon(
            [p for p in matrices if p.ndim == 2],
            learning_rate=settings.muon_lr,
            weight_decay=settings.weight_decay,
        )
        self.adam = torch.optim.AdamW(rest, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0)
        self.crops = Crops(corpus.train.to(device), settings.batch_tokens, settings.seed)
        held_out = tuple(text.to(device) for text in corpus.held_out)
        self.held_out = windows(held_out, MAX_LENGTH)
        self.seen = windows((corpus.train[: len(self.held_out[0]) * MAX_LENGTH],), MAX_LENGTH)
        self.tokens = 0
        self.best = math.inf
        self.best_step = 0

    def warm_up(self) -> None:
        """Compiles for each shape of a step, so that the clock of `train` starts afterwards."""
        start = time.monotonic()
        for length in CROP_LENGTHS:
            rows = max(1, self.settings.batch_tokens // length)
            ids = torch.zeros((rows, length), dtype=torch.long, device=self.device)
            self.backward(ids, ids)
        self.model.zero_grad(set_to_none=True)
        print(f"warm after {time.monotonic() - start:.0f} s", flush=True)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Adds the batch's gradients to those of the model; returns its loss."""
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = loss_of(self.forward, inputs, targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def train(self) -> tuple[int, float]:
        """Runs the schedule; returns the steps done and the seconds they took, checks included."""
        settings, start, step = self.settings, time.monotonic(), 0
        batches = iter(self.crops)
        running = torch.full((), math.log(VOCAB_SIZE), device=self.device)
        while True:
            seconds = time.monotonic() - start
            progress = max(step / settings.steps, seconds / settings.seconds)
            if progress >= 1:
                break
            running.lerp_(self.step(*next(batches), progress, step), 0.02)
            step += 1
            if step % settings.eval_every == 0:
                self.check(step, running.item(), time.monotonic() - start)
        self.check(step, running.item(), time.monotonic() - start)
        return step, time.monotonic() - start

    def step(self, inputs: Tensor, targets: Tensor, progress: float, step: int) -> Tensor:
        """One update of the weights and of their average; returns the batch's loss."""
        rate = min(1.0, progress / WARMUP, (1 - progress) / (1 - DECAY_FROM))
        self.muon.learning_rate = self.settings.muon_lr * rate
        self.adam.param_groups[0]["lr"] = self.settings.adam_lr * rate
        loss = self.backward(inputs, targets)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        averages, weights = list(self.average.parameters()), list(self.model.parameters())
        torch._foreach_lerp_(averages, [w.detach() for w in weights], 1 - min(0.998, step / 50))
        self.tokens += inputs.numel()
        return loss

    def check(self, step: int, running: float, seconds: float) -> None:
        """Measures the average on the held-out plays, and saves it when it is the best yet."""
        loss = mean_loss(self.average, *self.held_out)
        print(f"step {step} {seconds:.0f} s train {running:.4f} held-out {loss:.4f}", flush=True)
        if loss < self.best:
            self.best, self.best_step = loss, step
            copy.deepcopy(self.average).bfloat16().save_pretrained(self.settings.output)


def final_losses(trainer: Trainer) -> dict[str, float]:
    """Losses of the saved bf16 weights, computed in fp32 over windows of MAX_LENGTH tokens."""
    model: Any = LlamaForCausalLM.from_pretrained(trainer.settings.output, dtype=torch.float32)
    model.to(trainer.device)
    seen = tuple(part.to(trainer.device) for part in trainer.seen)
    return {
        "train_loss": round(mean_loss(model, *seen), 4),
        "held_out_loss": round(mean_loss(model, *trainer.held_out), 4),
    }


def main() -> None:
    settings = parse_settings()
    settings.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus = read_corpus(settings.corpus, settings.variants, settings.seed)
    trainer = Trainer(settings, corpus, device)
    trainer.warm_up()
    steps, seconds = trainer.train()
    save_tokenizer(settings.output)
    (settings.output / "excerpt.txt").write_text(excerpt(settings.corpus), encoding="utf-8")
    report = {
        **final_losses(trainer),
        "steps": steps,
        "best_step": trainer.best_step,
        "tokens": trainer.tokens,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "seed": settings.seed,
        "dropout": settings.dropout,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
