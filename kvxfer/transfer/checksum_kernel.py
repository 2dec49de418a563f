"""Checksums of KV on a GPU: a Triton kernel that reads the pages where they lie.

    tile        ROWS neighbouring tokens of one head and layer, whatever blocks they lie in
    program     every n-th tile of n programs, so that few programs see all of a long request; sums
                up word by word in registers, and over its threads once, at the end

Facts relied on:
- uint64 sums and products wrap, `>>` of uint64 is logical, and a tl.constexpr of 2^63 or more is
  uint64: so in Triton's interpreter (run by the tests) as on a GPU;
- int32 products wrap: offsets into the cache are int64;
- tl.arange wants powers of two: tiles are padded and masked;
- a copy from memory that is not pinned waits for the stream, so the block table is pinned first.

Importing this module needs triton; only what takes checksums on a GPU imports it.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from kvxfer.transfer.checksum_shard import MIX, STEP, KVShard, Stretch

MAX_ALIGN: Final = 16
"""Words: no load of a thread is longer."""
TILE_WORDS: Final = 1024
"""8 for each thread of 4 warps. With 2,048 the kernel takes 96 registers instead of 63 (of 8-byte
words, compiled for sm_90 with Triton 3.7.1), and half as many programs fit."""
COLUMNS: Final = (64, 32, 16, 8)
"""Widths of a tile, in words."""
PROGRAMS_PER_PROCESSOR: Final = 8
"""64 KiB on their way to each multiprocessor."""
INTERPRETED_PROGRAMS: Final = 3
"""More than one, so that the tests see how programs share the tiles."""

_SHIFT_0 = tl.constexpr(MIX[0][0])
_SHIFT_1 = tl.constexpr(MIX[1][0])
_SHIFT_2 = tl.constexpr(MIX[2][0])
_FACTOR_0 = tl.constexpr(MIX[0][1])
_FACTOR_1 = tl.constexpr(MIX[1][1])
_STEP = tl.constexpr(STEP)


def _mixed_values(values: tl.tensor) -> tl.tensor:
    """`mixed` of checksum_shard.py, of uint64."""
    values = (values ^ (values >> _SHIFT_0)) * _FACTOR_0
    values = (values ^ (values >> _SHIFT_1)) * _FACTOR_1
    return values ^ (values >> _SHIFT_2)


_mixed = triton.jit(_mixed_values)


def _sum_tiles(
    words: tl.tensor,
    layer_offsets: tl.tensor,
    plane_keys: tl.tensor,
    blocks: tl.tensor,
    partial_sums: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first_layer: tl.tensor,
    num_tiles: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    """Tiles are numbered by layer, then by tokens, then by head. blocks[0] holds token `start`.
    Offsets and strides are words, multiples of ALIGN: then neighbours are loaded together."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    start, stop = start.to(tl.int64), stop.to(tl.int64)
    head_stride = head_stride.to(tl.int64)
    first_entry = start // BLOCK_SIZE
    tiles_per_head = (stop - start + ROWS - 1) // ROWS
    total = tl.zeros([ROWS, COLUMNS], tl.uint64)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        head = tile % HEADS
        layer = first_layer + tile // HEADS // tiles_per_head
        tokens = start + tile // HEADS % tiles_per_head * ROWS + rows
        valid = tokens < stop
        ids = tl.load(blocks + tokens // BLOCK_SIZE - first_entry, mask=valid, other=0)
        plane = tl.load(layer_offsets + layer) + head * head_stride
        pages = plane + ids * block_stride + tokens % BLOCK_SIZE * slot_stride
        pages = tl.multiple_of(pages, ALIGN)
        plane_key = tl.load(plane_keys + layer * HEADS + head).to(tl.uint64)
        keys = _mixed(tokens.to(tl.uint64) * _STEP + plane_key)
        for begin in range(0, WORDS, COLUMNS):
            column = begin + columns
            mask = valid[:, None] & (column < WORDS)[None, :]
            word = tl.load(words + pages[:, None] + column[None, :], mask=mask, other=0)
            word = word.to(tl.int64).to(tl.uint64) & WORD_MASK
            key = keys[:, None] + (column.to(tl.uint64) * _STEP)[None, :]
            total += tl.where(mask, _mixed(word ^ key), 0)
    result = tl.sum(tl.sum(total, 1), 0)
    tl.store(partial_sums + tl.program_id(0), result.to(tl.int64))


# Not compiled anew because a number is 1, or a multiple of 16.
_NUMBERS: Final = [
    *("start", "stop", "first_layer", "num_tiles"),
    *("block_stride", "head_stride", "slot_stride"),
]
_sum_kernel = triton.jit(_sum_tiles, do_not_specialize=_NUMBERS)


def is_interpreted() -> bool:
    """Whether the kernel runs in Triton's interpreter, in Python and on the host."""
    return not isinstance(_sum_kernel, triton.JITFunction)


def device_sum(shard: KVShard, stretch: Stretch) -> torch.Tensor:
    """The sum as int64 [] on the shard's device, with wrap-around.

    Launches on the current stream of that device, which is the current one, and never
    synchronises; the tables of the shard, made at its first use, do.
    """
    words, tokens = shard.words[0], stretch.tokens
    _, heads, block_size, width = words.shape
    layer_offsets, plane_keys = shard.device_tables
    columns = _columns(width)
    rows = TILE_WORDS // columns
    num_tiles = len(stretch.layers) * heads * -(-len(tokens) // rows)
    programs = min(num_tiles, _max_programs(words.device))
    partial_sums = torch.empty(programs, dtype=torch.int64, device=words.device)
    _sum_kernel[(programs,)](
        *(words, layer_offsets, plane_keys, _table(stretch, words.device), partial_sums),
        *(tokens.start, tokens.stop, stretch.layers.start, num_tiles, *words.stride()[:3]),
        BLOCK_SIZE=block_size,
        HEADS=heads,
        WORDS=width,
        WORD_MASK=(1 << 8 * words.element_size()) - 1,
        ROWS=rows,
        COLUMNS=columns,
        ALIGN=math.gcd(*shard.layer_offsets, *words.stride()[:3], MAX_ALIGN),
    )
    return partial_sums.sum()


def _columns(width: int) -> int:
    """The width that leaves the fewest lanes idle; of several the largest."""
    return min(COLUMNS, key=lambda size: -(-width // size) * size)


def _max_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    return PROGRAMS_PER_PROCESSOR * int(properties.multi_processor_count)


def _table(stretch: Stretch, device: torch.device) -> torch.Tensor:
    ids = torch.tensor(stretch.ids, dtype=torch.int64, pin_memory=device.type != "cpu")
    return ids.to(device, non_blocking=True)
