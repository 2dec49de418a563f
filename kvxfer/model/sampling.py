"""From logits to a token, as a pure function of (logits, seed, position).

Gumbel-max: argmax(logits / temperature + G) with G = -log(-log(U)) is distributed as
softmax(logits / temperature). U comes from the counter-based generator Philox, keyed by the seed
and with the token's position in the counter's highest word, so neither the batch nor a hand-over
between workers changes what is drawn. (numpy advances the counter from its lowest word, so the
streams of two positions never overlap; raw words are mapped here, independent of numpy's own
distributions, which may change between versions.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ModelError, UsageError

if TYPE_CHECKING:
    import torch

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How a request's tokens are chosen: greedy at temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError("temperature", self.temperature, "must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p", self.top_p, "must be above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError("seed", self.seed, "must be at least 0 and below 2**64")


def sample(logits: torch.Tensor, position: int, spec: SampleSpec) -> int:
    """The token that stands at `position` (0-based, prompt included), from `logits` [V].

    Greedy takes the lowest id of equal logits. Raises ModelError when the largest logit is no
    finite number (a NaN anywhere makes it NaN).
    """
    scores = logits.detach().float().cpu().numpy().astype(np.float64)
    if not math.isfinite(scores.max()):
        raise ModelError(f"the logits for position {position} reach {scores.max()}")
    if spec.temperature == 0:
        return int(scores.argmax())
    # The largest is shifted to 0 first, so that a tiny temperature cannot overflow.
    scores = (scores - scores.max()) / spec.temperature
    if spec.top_p < 1:
        scores = nucleus(scores, spec.top_p)
    return int((scores + _gumbel(spec.seed, position, len(scores))).argmax())


def nucleus(scores: Float64Array, top_p: float) -> Float64Array:
    """`scores` (logits) with -inf outside the nucleus: the shortest prefix of the tokens, likeliest
    first and lowest id first among equals, whose probabilities sum to at least `top_p`."""
    order = np.argsort(-scores, kind="stable")
    probabilities = np.exp(scores[order] - scores[order[0]])
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    # The likeliest stays even if rounding makes its own predecessors' sum other than 0.
    outside = before >= top_p
    outside[0] = False
    kept = scores.copy()
    kept[order[outside]] = -np.inf
    return kept


def _gumbel(seed: int, position: int, size: int) -> Float64Array:
    counter = np.array([0, 0, 0, position], dtype=np.uint64)
    words = np.random.Philox(key=seed, counter=counter).random_raw(size)
    # 53 random bits and a half: strictly between 0 and 1, so both logarithms are finite.
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Float64Array = -np.log(-np.log(uniform))
    return noise
