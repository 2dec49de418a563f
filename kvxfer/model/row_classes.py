"""From how many rows on a linear layer gives each row the same bits whatever the others are.

Matrix libraries choose their kernels by shape, so a row's bits may depend on how many rows there
are. Measured in fp32: on a Zen 3 (AVX2) the classes are {1}, {2, 3} and {4 and more}; on a CPU of
another family they began later. So it is tried out with the model's own weights, not assumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import torch

from kvxfer.model.packing import MIN_ROWS

logger = logging.getLogger(__name__)

CANDIDATES: Final = (MIN_ROWS, 8, 16, 32)
COUNTS: Final = (*range(MIN_ROWS, 18), 24, 31, 32, 33, 48, 63, 64)
"""Numbers of rows that are tried, against the last."""

Linear = Callable[[torch.Tensor], torch.Tensor]


def stable_rows(linear: Linear, in_features: int) -> int | None:
    """The fewest of CANDIDATES from which on rows come out alike; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(COUNTS[-1], in_features, generator=generator)
    whole = linear(rows)
    odd = [count for count in COUNTS if not torch.equal(linear(rows[:count]), whole[:count])]
    beyond = max(odd, default=0)
    return next((least for least in CANDIDATES if least > beyond), None)


@torch.inference_mode()
def padded_rows(model: torch.nn.Module) -> int:
    """Rows that every forward pass of an fp32 model on the CPU is padded to, so that no batch
    changes a bit. MIN_ROWS, with a warning, where the CPU allows no such number."""
    found = [stable_rows(layer, layer.in_features) for layer in _distinct_linears(model)]
    known = [least for least in found if least is not None]
    if len(known) < len(found):
        logger.warning(
            "on this CPU a row's bits depend on the number of rows: KV of equal chunks is equal, "
            "but tokens may differ between batches where two are almost equally likely"
        )
        return MIN_ROWS
    return max(known, default=MIN_ROWS)


def _distinct_linears(model: torch.nn.Module) -> Iterable[torch.nn.Linear]:
    """One linear layer of each shape."""
    by_shape = {
        (layer.in_features, layer.out_features): layer
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    }
    return by_shape.values()
