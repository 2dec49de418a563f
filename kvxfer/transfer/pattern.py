"""Bytes that say where they belong, to try a lane out with: any misplaced run shows.

The pattern is one of logical positions (layer, token, head of the model, word of content), so that
caches of different layouts and block sizes, and shards of different heads, can be filled and
checked apart from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_STEP = 0x1E3779B97F4A7C15
"""2^64 over the golden ratio, less its highest bits: odd, so that no two positions are alike, and
neighbours differ in most bytes."""


_LAYER_SHIFT = 40
"""More words than a trial has in one layer, so that the first blocks of a pattern are a pattern."""


@dataclass(frozen=True, slots=True)
class PatternHeads:
    """Which heads views hold: those from `first` on, of the model's `total`."""

    first: int
    total: int


def write_pattern(
    views: Sequence[torch.Tensor],
    blocks: Sequence[int],
    seed: int,
    heads: PatternHeads | None = None,
) -> None:
    """Fill `blocks` of all layers. `views`: [capacity_blocks, H, N, C], one a layer; of all the
    model's heads unless `heads` says which."""
    for layer, view in enumerate(views):
        places = _bytes_of(view)
        places[_ids(blocks, view)] = _pattern(view, len(blocks), layer, seed, heads)


def erase(views: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    for view in views:
        _bytes_of(view)[_ids(blocks, view)] = 0


def check_pattern(
    views: Sequence[torch.Tensor],
    blocks: Sequence[int],
    seed: int,
    heads: PatternHeads | None = None,
) -> bool:
    """Whether every byte of `blocks` is what `write_pattern` writes."""
    for layer, view in enumerate(views):
        found = _bytes_of(view)[_ids(blocks, view)]
        if not torch.equal(found, _pattern(view, len(blocks), layer, seed, heads)):
            return False
    return True


def _bytes_of(view: torch.Tensor) -> torch.Tensor:
    """[capacity_blocks, H, N, bytes of C]."""
    return view.view(torch.uint8)


def _ids(blocks: Sequence[int], view: torch.Tensor) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=view.device)


def _pattern(
    view: torch.Tensor, num_blocks: int, layer: int, seed: int, held: PatternHeads | None
) -> torch.Tensor:
    """[num_blocks, H, N, bytes of C] of logical positions."""
    _, heads, slots, content = _bytes_of(view).shape
    held = held or PatternHeads(0, heads)
    width = 8 if content % 8 == 0 else 1
    words = content // width
    own = torch.arange(held.first * words, (held.first + heads) * words, device=view.device)
    token = torch.arange(num_blocks * slots, device=view.device)
    token *= held.total * words
    token += seed + (layer << _LAYER_SHIFT)
    position = token[:, None] + own
    position *= _STEP
    if width == 1:
        position = (position >> 32).to(torch.uint8)
    shape = num_blocks, slots, heads, words
    return position.view(shape).view(torch.uint8).transpose(1, 2)
