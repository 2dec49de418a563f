"""Digests of KV by its logical content: equal KV has equal digests, whatever the layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from kvxfer.cache.footprint import kv_tokens, prompt_entries
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.table import BlockTable
from kvxfer.errors import PlanError

DIGEST_BYTES = 16
_BATCH_BLOCKS = 16
"""Blocks gathered at once: bounds the scratch memory (32 MiB at 2 MiB a block), and keeps the
number of kernels and copies on a GPU far below one per block and layer."""


def block_digests(
    views: Sequence[torch.Tensor], blocks: Sequence[int], num_tokens: int
) -> list[str]:
    """One hex digest for each block that holds some of the first `num_tokens` tokens.

    `views[l]` is layer l as [B, H, N, C], strided as its layout has it, with C contiguous; `blocks`
    is the request's block table from token 0 on. A digest covers the bytes of [L, n, H, C] in this
    order, where n is N, or what is left for the last block. Table entries past the tokens are not
    read. On a GPU, work of the current stream is waited for; the caller has ordered that after
    whatever wrote the KV.

    Raises PlanError when the table is too short, names a block that is not there, or the views
    differ in shape or dtype.
    """
    _check_views(views)
    num_blocks, _, block_size, _ = views[0].shape
    needed = -(-num_tokens // block_size)
    if num_tokens < 0 or needed > len(blocks):
        raise PlanError(
            f"{num_tokens} tokens in blocks of {block_size} do not fit a table of {len(blocks)}"
        )
    for block in blocks[:needed]:
        if not 0 <= block < num_blocks:
            raise PlanError(f"block {block} is not among the {num_blocks} of the cache")
    digests: list[str] = []
    for first in range(0, needed, _BATCH_BLOCKS):
        batch = blocks[first : min(first + _BATCH_BLOCKS, needed)]
        for content in _gather(views, batch):
            valid = min(block_size, num_tokens - len(digests) * block_size)
            digests.append(_digest(content[:, :valid]))
    return digests


def prompt_digests(cache: KVCache, tables: Sequence[BlockTable], num_prompt: int) -> list[str]:
    """Those of what a hand-over of the prompt has to bring, group after group; read before decode
    writes to the last block of each."""
    specs = cache.geometry.specs
    entries, tokens = prompt_entries(specs, num_prompt), kv_tokens(specs, num_prompt, 0)
    digests: list[str] = []
    for group, (kept, table) in enumerate(zip(entries, tables, strict=True)):
        held = tokens[group] - kept.start * specs[group].block_size
        digests += block_digests(cache.views[group], table.ids(kept), max(0, held))
    return digests


def _check_views(views: Sequence[torch.Tensor]) -> None:
    if not views:
        raise PlanError("no layers to take digests of")
    shape, dtype = views[0].shape, views[0].dtype
    for layer, view in enumerate(views):
        if view.dim() != 4 or view.shape != shape or view.dtype != dtype:
            raise PlanError(
                f"layer {layer} is {view.dtype} {list(view.shape)}, "
                f"not [B, H, N, C] like layer 0: {dtype} {list(shape)}"
            )
        if view.stride(3) != 1:
            raise PlanError(f"layer {layer}: content has stride {view.stride(3)}, not 1")


def _gather(views: Sequence[torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
    """The bytes of `blocks` in logical order: uint8 [blocks, L, N, H, C × itemsize], on the CPU."""
    index = torch.tensor(blocks, dtype=torch.int64, device=views[0].device)
    layers = [view.view(torch.uint8).index_select(0, index) for view in views]
    return torch.stack(layers, dim=1).transpose(2, 3).contiguous().cpu()


def _digest(content: torch.Tensor) -> str:
    data = content.contiguous().view(-1).numpy().data
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
