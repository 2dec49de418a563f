"""The tokens that follow the steps of a pass, from its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvxfer.errors import ModelError
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
    `best` is what is `likeliest`. Raises ModelError where the largest is not finite."""
    # Not tolist() alone: on a GPU's tensor it waits for the device without releasing the
    # interpreter, and no other thread gets on (measured: one transfer a step).
    values, ids = (likeliest(logits) if best is None else best).cpu().tolist()
    tokens = [int(token) for token in ids]
    for row, step in enumerate(steps):
        spec, position = step.sample or SampleSpec(), _position_after(info, step)
        if not math.isfinite(values[row]):
            raise ModelError(f"the logits for position {position} are not finite")
        if spec.temperature > 0:
            tokens[row] = sample(logits[row], position, spec)
    return tokens


def _position_after(info: ModelInfo, step: SequenceStep) -> int:
    is_prompt = info.is_encoder_decoder and not step.num_encoder_tokens
    return FIRST_TOKEN if is_prompt else step.end
