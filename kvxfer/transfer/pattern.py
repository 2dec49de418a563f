"""Bytes that say where they belong, to try a lane out with: any misplaced run shows.

The pattern is one of logical positions (layer, head, token, byte of content), so that two caches
of different layouts and block sizes can be filled and checked apart from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STEP = 0x9E3779B1
"""2^32 over the golden ratio, an odd number: neighbours differ in their high bits."""


def write_pattern(views: Sequence[torch.Tensor], blocks: Sequence[int], seed: int) -> None:
    """Fill `blocks` of all layers. `views`: [capacity_blocks, H, N, C], one a layer."""
    for layer, view in enumerate(views):
        places = _bytes_of(view)
        places[_ids(blocks, view)] = _pattern(view, len(blocks), layer, seed)


def erase(views: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    for view in views:
        _bytes_of(view)[_ids(blocks, view)] = 0


def check_pattern(views: Sequence[torch.Tensor], blocks: Sequence[int], seed: int) -> bool:
    """Whether every byte of `blocks` is what `write_pattern` writes."""
    for layer, view in enumerate(views):
        found = _bytes_of(view)[_ids(blocks, view)]
        if not torch.equal(found, _pattern(view, len(blocks), layer, seed)):
            return False
    return True


def _bytes_of(view: torch.Tensor) -> torch.Tensor:
    """[capacity_blocks, H, N, bytes of C]."""
    return view.view(torch.uint8)


def _ids(blocks: Sequence[int], view: torch.Tensor) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=view.device)


def _pattern(view: torch.Tensor, num_blocks: int, layer: int, seed: int) -> torch.Tensor:
    """[num_blocks, H, N, bytes of C] of logical positions."""
    _, heads, slots, content = _bytes_of(view).shape
    tokens = num_blocks * slots
    position = torch.arange(heads * tokens * content, device=view.device)
    position += seed + layer * position.numel()
    mixed = ((position * _STEP) >> 21).to(torch.uint8)
    return mixed.view(heads, num_blocks, slots, content).transpose(0, 1)
