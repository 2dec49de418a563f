"""A 64-bit checksum of KV that is equal for equal KV, in every layout and for every block size.

    checksum = Σ mixed(word ^ key(index))    mod 2^64, over the words of the valid tokens
    index    = (group, layer of the group, head of the whole model, token, word within C)

The index knows neither layout, block nor worker, so the sums of disjoint pieces add up: heads of
several ranks, chunks of tokens, ranges of layers, groups. Slots of a block that hold no token of
the range are not read.

    word     8 bytes where C × itemsize is a multiple of 8, else 4, 2 or 1: the same on both sides,
             which have the same specs; little-endian, extended by zeros
    mixed    a bijection of 64 bits: xor of a shift and an odd product, twice, and a last shift.
             Shifts and factors are 'Mix13' of David Stafford's 'Better Bit Mixing' (2011), which
             SplitMix64 ends with too (Steele, Lea, Flood, OOPSLA 2014)
    key      mixed(mixed((plane + 1) × G) + token × G) + word number × G, where plane packs group,
             layer and head, and G is 2^64 ÷ the golden ratio, made odd: key is hashed once a row
             of C, and steps along it

A single changed word always changes the sum, since `mixed` is a bijection. Words, blocks or tokens
that changed places, a page of zeros and the like leave it as it was with a probability of about
2^-64. Two things this rests on: the sum is linear, so what comes last in `mixed` must not be (its
last shift is no luxury); and two rows have unrelated keys. It is no defence against somebody who
forges KV on purpose: the constants are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from kvxfer.cache.layout import MAX_GROUPS
from kvxfer.errors import PlanError

MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""(right shift, factor) of each round of `mixed`."""
STEP: Final = 0x9E3779B97F4A7C15
"""G above."""
MAX_INDEX: Final = 1 << 24
"""Layers of a group, and heads: what a plane has bits for."""
_WORD_DTYPES: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]


def mix_in_place(values: UInt64Array) -> None:
    """`mixed` of each value."""
    shifted = np.empty_like(values)
    for shift, factor in MIX:
        np.right_shift(values, np.uint64(shift), out=shifted)
        np.bitwise_xor(values, shifted, out=values)
        if factor != 1:
            np.multiply(values, np.uint64(factor), out=values)


@dataclass(frozen=True, eq=False)
class KVShard:
    """The layers of one group as one worker holds them. Made once a cache; aliases its memory.

    `views[l]` is layer l as [B, H, N, C], all strided alike, C contiguous; they hold the heads
    [first_head, first_head + H) of the `total_heads` of the model. For some of a worker's heads
    give narrowed views. Raises PlanError when the views differ or cannot be read word by word, and
    for a group or head out of range.
    """

    views: Sequence[torch.Tensor]
    total_heads: int
    first_head: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        _check_views(self.views)
        last = self.first_head + self.views[0].shape[1]
        if not 0 <= self.first_head < last <= self.total_heads <= MAX_INDEX:
            raise PlanError(
                f"first_head: heads {self.first_head} to {last - 1} are not among the "
                f"{self.total_heads} of total_heads, at most {MAX_INDEX}"
            )
        if not 0 <= self.group < MAX_GROUPS:
            raise PlanError(f"group: {self.group} is not among the {MAX_GROUPS} there may be")

    @property
    def device(self) -> torch.device:
        return self.views[0].device

    @cached_property
    def words(self) -> tuple[torch.Tensor, ...]:
        """The views as signed words, [B, H, N, words of C]."""
        dtype = _WORD_DTYPES[_word_bytes(self.views[0])]
        return tuple(view.view(dtype) for view in self.views)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer starts, in words from layer 0."""
        starts = [one.data_ptr() // one.element_size() for one in self.words]
        return tuple(start - starts[0] for start in starts)

    @cached_property
    def plane_keys(self) -> UInt64Array:
        """mixed((plane + 1) × G) of each layer and head: [L, H]."""
        _, heads, _, _ = self.views[0].shape
        layers = np.arange(len(self.views), dtype=np.uint64)[:, None]
        head = np.arange(self.first_head, self.first_head + heads, dtype=np.uint64)
        plane = np.uint64(self.group << 48) | layers << np.uint64(24) | head
        keys = (plane + np.uint64(1)) * np.uint64(STEP)
        mix_in_place(keys)
        return keys

    @cached_property
    def device_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the kernel, on the views' device: `layer_offsets` and `plane_keys`, int64 [L] and
        [L, H]."""
        offsets = torch.tensor(self.layer_offsets, dtype=torch.int64)
        keys = torch.from_numpy(self.plane_keys.view(np.int64))
        return offsets.to(self.device), keys.to(self.device)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Checked: `tokens`, not empty, whose first lies in block ids[0], in `layers`, not empty."""

    ids: Sequence[int]
    tokens: range
    layers: range


def _word_bytes(view: torch.Tensor) -> int:
    """The largest power of two up to 8 that divides C × itemsize."""
    content_bytes = view.shape[3] * view.element_size()
    return min(8, content_bytes & -content_bytes)


def _check_views(views: Sequence[torch.Tensor]) -> None:
    if not 1 <= len(views) <= MAX_INDEX:
        raise PlanError(f"views: {len(views)} layers, not 1 to {MAX_INDEX}")
    first = views[0]
    for layer, view in enumerate(views):
        if view.dim() != 4 or 0 in view.shape:
            raise PlanError(f"views: layer {layer} is {list(view.shape)}, not [B, H, N, C]")
        for name in ("shape", "dtype", "device"):
            ours, theirs = getattr(view, name), getattr(first, name)
            if ours != theirs:
                raise PlanError(f"views: layer {layer} has {name} {ours}, layer 0 {theirs}")
        size = _word_bytes(view)
        strides = [stride * view.element_size() for stride in view.stride()]
        if view.stride() != first.stride() or view.stride(3) != 1:
            raise PlanError(
                f"views: layer {layer} has strides {view.stride()}, layer 0 {first.stride()}: "
                "they must be equal, and the last 1"
            )
        if any(stride % size for stride in (view.data_ptr(), *strides[:3])):
            raise PlanError(f"views: layer {layer} does not lie on multiples of {size} bytes")


def checked_stretch(
    shard: KVShard, blocks: Sequence[int], tokens: range, layers: range | None, first_entry: int
) -> Stretch | None:
    """None where there is nothing to sum up."""
    num_blocks, _, block_size, _ = shard.views[0].shape
    layers = range(len(shard.views)) if layers is None else layers
    if first_entry < 0:
        raise PlanError(f"first_entry: {first_entry} is negative")
    begin = first_entry * block_size
    end = begin + len(blocks) * block_size
    _check_range("layers", layers, range(len(shard.views)), "layers of the group")
    _check_range("tokens", tokens, range(begin, end), "tokens of the block table")
    if not tokens or not layers:
        return None
    used = slice(tokens.start // block_size - first_entry, -(-(tokens.stop - begin) // block_size))
    ids = blocks[used]
    for block in ids:
        if not 0 <= block < num_blocks:
            raise PlanError(f"blocks: {block} is not among the {num_blocks} of the cache")
    return Stretch(ids, tokens, layers)


def _check_range(field: str, wanted: range, there: range, what: str) -> None:
    if wanted.step != 1:
        raise PlanError(f"{field}: {wanted} must have step 1")
    if wanted and not (there.start <= wanted.start and wanted.stop <= there.stop):
        raise PlanError(f"{field}: {wanted} leaves the {what}, {there}")
