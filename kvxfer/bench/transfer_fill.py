"""Contents for much memory that say where they belong, quick to make and to compare.

Word i of all that moves, 8 bytes, is i times an odd constant: no two are alike, so that a run out
of its place shows wherever it lies. Words are counted by layer, head, token and content, whatever
the layout. `kvxfer.transfer.pattern` does the same by byte, for caches of any shape: 40 times as
much work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, odd, as a signed number: products wrap round."""


def fill(views: Sequence[torch.Tensor], blocks: Sequence[int], seed: int) -> None:
    """Write `blocks` of all layers. `views`: [capacity_blocks, H, N, C], one a layer, C a multiple
    of 8 bytes."""
    for layer, view in enumerate(views):
        words = _words_of(view)
        words[_ids(blocks, view)] = _expected(words, len(blocks), layer, seed)


def clear(views: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    for view in views:
        _words_of(view).index_fill_(0, _ids(blocks, view), 0)


def is_filled(views: Sequence[torch.Tensor], blocks: Sequence[int], seed: int) -> bool:
    """Whether every byte of `blocks` is what `fill` writes."""
    for layer, view in enumerate(views):
        words = _words_of(view)
        found = words[_ids(blocks, view)]
        if not torch.equal(found, _expected(words, len(blocks), layer, seed)):
            return False
    return True


def _words_of(view: torch.Tensor) -> torch.Tensor:
    """[capacity_blocks, H, N, words of C]."""
    return view.view(torch.int64)


def _ids(blocks: Sequence[int], view: torch.Tensor) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=view.device)


def _expected(words: torch.Tensor, num_blocks: int, layer: int, seed: int) -> torch.Tensor:
    """[num_blocks, H, N, words of C]."""
    _, heads, slots, content = words.shape
    count = heads * num_blocks * slots * content
    first = (seed << 40) + layer * count
    index = torch.arange(first, first + count, device=words.device).mul_(_STEP)
    return index.view(heads, num_blocks, slots, content).transpose(0, 1)
