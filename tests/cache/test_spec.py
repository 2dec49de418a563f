"""The shape of a group of layers: derived sizes, and what is refused."""

import dataclasses

import pytest
import torch

from kvxfer.cache.spec import DTYPE_SIZES, GroupKind, KVCacheSpec
from kvxfer.errors import UsageError

LLAMA = KVCacheSpec(
    num_layers=32, num_kv_heads=8, head_dim_k=128, head_dim_v=128, dtype="bfloat16", block_size=16
)


def test_a_block_of_an_8b_llama_is_2_mib():
    assert LLAMA.content_dim == 256
    assert LLAMA.page_bytes == 64 * 1024
    assert LLAMA.block_bytes == 2 * 1024 * 1024


def test_latent_attention_has_one_head_and_no_values():
    mla = dataclasses.replace(LLAMA, num_kv_heads=1, head_dim_k=576, head_dim_v=0)
    assert mla.content_dim == 576
    assert mla.page_bytes == 16 * 576 * 2


@pytest.mark.parametrize("name", DTYPE_SIZES)
def test_dtype_sizes_are_torchs(name):
    dtype = getattr(torch, name)
    assert dataclasses.replace(LLAMA, dtype=name).itemsize == dtype.itemsize


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for_tokens_round_up(num_tokens, num_blocks):
    assert LLAMA.num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", 0),
        ("head_dim_k", 0),
        ("head_dim_v", -1),
        ("block_size", 0),
        ("block_size", -16),
        ("replicas", 0),
        ("replicas", 2),  # of its 8 heads
        ("dtype", "int8"),
        ("dtype", "torch.bfloat16"),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(LLAMA, **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


SLIDING, MLA, FULL = GroupKind.SLIDING, GroupKind.MLA, GroupKind.FULL


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": SLIDING}, "window"),
        ({"kind": SLIDING, "window": -1}, "window"),
        ({"window": 16}, "window"),
        ({"window": -1}, "window"),
        ({"kind": MLA, "num_kv_heads": 1, "window": 16}, "window"),
        ({"kind": GroupKind.CROSS, "window": 16}, "window"),
        ({"kind": MLA, "num_kv_heads": 2}, "num_kv_heads"),
    ],
)
def test_a_kind_has_what_belongs_to_it_and_nothing_else(changes, field):
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(LLAMA, **changes)
    assert caught.value.field == field


def test_kinds_that_can_be():
    assert dataclasses.replace(LLAMA, kind=SLIDING, window=1).window == 1
    assert dataclasses.replace(LLAMA, kind=MLA, num_kv_heads=1, head_dim_v=0).kind is MLA
    assert dataclasses.replace(LLAMA, kind=GroupKind.CROSS).window == 0
    assert LLAMA.kind is FULL
