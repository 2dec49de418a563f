"""Attention of one new token per sequence, read straight from the paged cache: a Triton kernel.

    views[l]  [B, H, N, C]       any strides: the kernel knows no layout's name
    split i of a sequence        tokens [first + i·per, first + (i + 1)·per) of its window, one
                                 program each, so that a long sequence keeps many processors busy
    combine                      the splits' partial softmaxes, weighted into one result

Facts relied on:
- Triton's interpreter (TRITON_INTERPRET=1 when this module is imported) computes tl.dot of bf16
  wrongly (3.7 to 3.9, run), so everything is converted to fp32 first. On a GPU a dot in tf32 then
  loses nothing of a 16-bit K (tf32 keeps 10 bits of the mantissa, bf16 has 7, fp16 10); fp32 needs
  'ieee', which is not the default;
- a GPU wants at least 16 rows and columns in tl.dot, and tl.arange wants powers of two: groups
  and head sizes are padded and masked;
- int32 products wrap: offsets into the cache are int64;
- it compiles for sm_80, sm_90 and sm_100 with Triton 3.6.0, 3.7.1 and 3.9.0 (run without a GPU).

Importing this module needs triton; only what runs decode steps on a GPU imports it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kvxfer.errors import ModelError

MIN_DOT: Final = 16
WANTED_PROGRAMS: Final = 256
"""About two for each multiprocessor of a large GPU."""
MAX_SPLITS: Final = 32
MIN_TOKENS_PER_SPLIT: Final = 128
"""Of the longest context; below that the combining costs more than the splitting gains."""


def _attend_split(
    query: tl.tensor,
    view: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    partial_out: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    scaling: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    query_dim_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    content_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS_K: tl.constexpr,
    COLUMNS_V: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (sequence, KV head, split): the softmax over its tokens for GROUP query heads, not
    yet divided by its sum. ROWS, COLUMNS_K, COLUMNS_V are GROUP, DIM_K, DIM_V padded.

    Long, but one loop over state that helpers would have to hand to and fro.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(1) * GROUP, tl.num_programs(2)
    length = tl.load(seq_lens + sequence).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    num_tiles = (length - first + TILE - 1) // TILE
    per_split = (num_tiles + num_splits - 1) // num_splits * TILE
    start = first + split * per_split
    end = tl.minimum(start + per_split, length)

    rows, tile = tl.arange(0, ROWS), tl.arange(0, TILE)
    columns_k, columns_v = tl.arange(0, COLUMNS_K), tl.arange(0, COLUMNS_V)
    heads = kv_head * GROUP + rows
    q_mask = (rows < GROUP)[:, None] & (columns_k < DIM_K)[None, :]
    q_offsets = heads[:, None] * query_head_stride + columns_k[None, :] * query_dim_stride
    q = tl.load(query + sequence * query_row_stride + q_offsets, mask=q_mask, other=0.0)
    q = q.to(tl.float32)
    head_base = view + kv_head.to(tl.int64) * head_stride

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    out = tl.full([ROWS, COLUMNS_V], 0.0, tl.float32)
    for begin in range(start, end, TILE):
        tokens = begin + tile
        valid = tokens < end
        table = block_tables + sequence * table_stride + tokens // BLOCK_SIZE
        blocks = tl.load(table, mask=valid, other=0).to(tl.int64)
        slots = (tokens % BLOCK_SIZE).to(tl.int64)
        pages = head_base + (blocks * block_stride + slots * slot_stride)[:, None]
        k_mask = valid[:, None] & (columns_k < DIM_K)[None, :]
        k = tl.load(pages + columns_k[None, :] * content_stride, mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision=PRECISION) * scaling
        if SOFTCAP > 0.0:
            # softcap · tanh(scores / softcap), tanh by way of the sigmoid.
            scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # At least one token of a tile is valid, so the new maximum is a number.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        v_mask = valid[:, None] & (columns_v < DIM_V)[None, :]
        v_columns = (DIM_K + columns_v)[None, :] * content_stride
        v = tl.load(pages + v_columns, mask=v_mask, other=0.0)
        out = out * shrink[:, None]
        out += tl.dot(weights, v.to(tl.float32), input_precision=PRECISION)
        largest = new_largest

    places = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(partial_max + places, largest, mask=rows < GROUP)
    tl.store(partial_sum + places, total, mask=rows < GROUP)
    out_mask = (rows < GROUP)[:, None] & (columns_v < DIM_V)[None, :]
    tl.store(partial_out + places[:, None] * DIM_V + columns_v[None, :], out, mask=out_mask)


def _combine(
    partial_out: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    output: tl.tensor,
    DIM_V: tl.constexpr,
    COLUMNS_V: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Program (sequence · head): zeros where no split saw a token. SPLITS is a power of two."""
    place = tl.program_id(0).to(tl.int64)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, COLUMNS_V)
    largest = tl.load(partial_max + place * SPLITS + splits)
    sums = tl.load(partial_sum + place * SPLITS + splits)
    overall = tl.max(largest, 0)
    overall = tl.where(overall == float("-inf"), 0.0, overall)
    weights = tl.exp(largest - overall)
    total = tl.sum(sums * weights, 0)
    total = tl.where(total == 0.0, 1.0, total)
    offsets = (place * SPLITS + splits)[:, None] * DIM_V + columns[None, :]
    parts = tl.load(partial_out + offsets, mask=(columns < DIM_V)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(
        output + place * DIM_V + columns,
        result.to(output.dtype.element_ty),
        mask=columns < DIM_V,
    )


_attend_kernel = triton.jit(_attend_split)
_combine_kernel = triton.jit(_combine)


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, in Python and on the host."""
    return not isinstance(_attend_kernel, triton.JITFunction)


def paged_decode(
    query: torch.Tensor,
    view: torch.Tensor,
    head_dim_k: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """[R, heads, Dk] queries, any strides, over `view` [B, H, N, C] to a new [R, heads, Dv].

    Row r is the last of `seq_lens[r]` tokens, whose KV is written; token t lies in block
    `block_tables[r, t // N]` (int32 [R, max_blocks], rows of one stretch). A length of 0 gives
    zeros. Nothing is read of a table, nor of a block, beyond the length; with `window` nothing
    before the last `window` tokens. `num_splits`, a power of two, is chosen by the shapes alone.
    Raises ModelError when the shapes do not fit together. Launches on the current stream and
    never synchronises.
    """
    _check_shapes(query, view, head_dim_k)
    num_rows, num_heads, dim_k = query.shape
    _, kv_heads, block_size, content = view.shape
    dim_v = content - dim_k
    splits = num_splits or _num_splits(num_rows * kv_heads, block_tables.shape[1] * block_size)
    partial_out = query.new_empty((num_rows, num_heads, splits, dim_v), dtype=torch.float32)
    partial_max = query.new_empty((num_rows, num_heads, splits), dtype=torch.float32)
    partial_sum = torch.empty_like(partial_max)
    output = query.new_empty((num_rows, num_heads, dim_v))
    columns_k, columns_v = _padded(dim_k), _padded(dim_v)
    _attend_kernel[(num_rows, kv_heads, splits)](
        *(query, view, block_tables, seq_lens, partial_out, partial_max, partial_sum),
        *(float(scaling), *query.stride(), *view.stride(), block_tables.stride(0)),
        BLOCK_SIZE=block_size,
        GROUP=num_heads // kv_heads,
        DIM_K=dim_k,
        DIM_V=dim_v,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        PRECISION="ieee" if view.dtype == torch.float32 else "tf32",
        ROWS=_padded(num_heads // kv_heads),
        COLUMNS_K=columns_k,
        COLUMNS_V=columns_v,
        TILE=64 if max(columns_k, columns_v) <= 128 else 32,
    )
    _combine_kernel[(num_rows * num_heads,)](
        *(partial_out, partial_max, partial_sum, output),
        DIM_V=dim_v,
        COLUMNS_V=columns_v,
        SPLITS=splits,
    )
    return output


def _check_shapes(query: torch.Tensor, view: torch.Tensor, head_dim_k: int) -> None:
    (_, num_heads, dim_k), (_, kv_heads, _, content) = query.shape, view.shape
    if dim_k != head_dim_k or num_heads % kv_heads or content <= head_dim_k:
        raise ModelError(f"{num_heads} queries of {dim_k} over {kv_heads} heads of {content}")


def _padded(extent: int) -> int:
    return max(MIN_DOT, 1 << (extent - 1).bit_length())


def _num_splits(num_programs: int, max_tokens: int) -> int:
    """A power of two: enough programs in all, none for want of tokens even at the longest."""
    wanted = min(MAX_SPLITS, WANTED_PROGRAMS // num_programs, max_tokens // MIN_TOKENS_PER_SPLIT)
    return 1 << max(wanted, 1).bit_length() - 1
