"""The tokens that follow the steps of a pass, from its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvxfer.errors import NotFinite
from kvxfer.model.encoder_decoder import FIRST_TOKEN
from kvxfer.model.loader import ModelInfo
from kvxfer.model.packing import SequenceStep
from kvxfer.model.sampling import SampleSpec, sample


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row of `logits` [R, V], and its id: float64 [2, R], which holds both, so
    that one copy brings them to the host. max gives the first, hence lowest, id of equal logits."""
    best = logits.max(dim=-1)
    return torch.stack([best.values.double(), best.indices.double()])


def choose(
    info: ModelInfo,
    steps: Sequence[SequenceStep],
    logits: torch.Tensor,
    best: torch.Tensor | None = None,
) -> list[int]:
    """By each step's SampleSpec, greedy where it has none, from `logits` [len(steps), V], of which
    `best` is what is `likeliest`. Raises NotFinite where the largest is not finite."""
    # Not tolist() alone: on a GPU's tensor it waits for the device without releasing the
    # interpreter, and no other thread gets on (measured: one transfer a step).
    values, ids = (likeliest(logits) if best is None else best).cpu().tolist()
    problems = {
        row: f"the logits for position {_position_after(info, steps[row])} are not finite"
        for row in range(len(steps))
        if not math.isfinite(values[row])
    }
    tokens = {row: int(ids[row]) for row in range(len(steps)) if row not in problems}
    for row in tokens:
        spec = steps[row].sample or SampleSpec()
        if spec.temperature > 0:
            tokens[row] = sample(logits[row], _position_after(info, steps[row]), spec)
    if problems:
        raise NotFinite(problems, [tokens.get(row) for row in range(len(steps))])
    return list(tokens.values())


def _position_after(info: ModelInfo, step: SequenceStep) -> int:
    is_prompt = info.is_encoder_decoder and not step.num_encoder_tokens
    return FIRST_TOKEN if is_prompt else step.end
