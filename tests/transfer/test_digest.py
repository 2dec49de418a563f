"""Digests: equal for equal KV in every layout, different for anything else."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import PlanError, TransferError
from kvxfer.memory.host import HostDriver
from kvxfer.transfer.digest import block_digests, prompt_digests

BUDGET = settings(max_examples=10, deadline=None, derandomize=True)

every_layout = pytest.mark.parametrize("layout", KVCacheLayout)
cases = given(
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    block_size=st.integers(1, 4),
    content=st.integers(1, 3),
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
    num_tokens=st.integers(0, 12),
    blocks=st.permutations(range(13)),
    seed=st.integers(0, 1000),
)


def make_views(spec, layout, capacity):
    """Per-layer [B, H, N, C] views of a zeroed cache, padded by its granularity."""
    geometry = GroupGeometry.build(spec, layout, capacity, 64)
    memory = torch.zeros(geometry.total_bytes, dtype=torch.uint8)
    memory = memory.view(getattr(torch, spec.dtype))
    stride_l, *strides = (stride // spec.itemsize for stride in geometry.strides)
    shape = (capacity, spec.num_kv_heads, spec.block_size, spec.content_dim)
    return [memory.as_strided(shape, strides, layer * stride_l) for layer in range(spec.num_layers)]


def fill(views, blocks, kv):
    """Write kv [tokens, L, H, C] as the blocks' tokens."""
    block_size = views[0].shape[2]
    for token, content in enumerate(kv):
        for view, layer in zip(views, content, strict=True):
            view[blocks[token // block_size], :, token % block_size] = layer


def make_kv(spec, num_tokens, seed):
    shape = (num_tokens, spec.num_layers, spec.num_kv_heads, spec.content_dim)
    values = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.float32).to(getattr(torch, spec.dtype))


@every_layout
@BUDGET
@cases
def test_digests_are_those_of_the_logical_bytes(
    layout, num_layers, num_heads, block_size, content, dtype, num_tokens, blocks, seed
):
    spec = KVCacheSpec(num_layers, num_heads, content, 0, dtype, block_size)
    kv = make_kv(spec, num_tokens, seed)
    views = make_views(spec, layout, 13)
    fill(views, blocks, kv)
    expected = []
    for first in range(0, num_tokens, block_size):
        logical = kv[first : first + block_size].transpose(0, 1)  # [L, n, H, C]
        data = logical.contiguous().view(torch.uint8).numpy().tobytes()
        expected.append(hashlib.blake2b(data, digest_size=16).hexdigest())
    assert block_digests(views, blocks, num_tokens) == expected


SPEC = KVCacheSpec(2, 2, 3, 1, "bfloat16", 4)


@every_layout
def test_one_changed_element_changes_the_digest_of_its_block_alone(layout):
    views = make_views(SPEC, layout, 6)
    blocks = [4, 1, 2]
    fill(views, blocks, make_kv(SPEC, 10, seed=1))
    before = block_digests(views, blocks, 10)
    assert len(set(before)) == 3
    views[1][1, 1, 3, 2] += 1
    after = block_digests(views, blocks, 10)
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]


@every_layout
def test_bytes_past_the_last_token_do_not_count(layout):
    views = make_views(SPEC, layout, 6)
    blocks = [4, 1, 2]
    fill(views, blocks, make_kv(SPEC, 10, seed=1))
    before = block_digests(views, blocks, 10)
    for view in views:
        view[2, :, 2:] = 7
        view[[0, 3, 5]] = 7
    assert block_digests(views, blocks, 10) == before
    assert block_digests(views, blocks[:2], 8) == before[:2]


def test_a_request_longer_than_a_batch_has_a_digest_for_every_block():
    spec = KVCacheSpec(1, 1, 2, 0, "float32", 2)
    kv = make_kv(spec, 99, seed=3)
    blocks = list(range(60, 0, -1))
    views = make_views(spec, KVCacheLayout.LBNHC, 61)
    fill(views, blocks, kv)
    expected = [
        hashlib.blake2b(kv[first : first + 2].numpy().tobytes(), digest_size=16).hexdigest()
        for first in range(0, 99, 2)
    ]
    assert block_digests(views, blocks, 99) == expected


@pytest.mark.parametrize(
    ("blocks", "num_tokens"), [([1, 2], 9), ([], 1), ([1, 2], -1), ([1, 6], 5), ([-1, 2], 5)]
)
def test_a_table_that_does_not_hold_the_tokens_is_refused(blocks, num_tokens):
    views = make_views(SPEC, KVCacheLayout.LBHNC, 6)
    with pytest.raises(TransferError):
        block_digests(views, blocks, num_tokens)


def test_views_of_different_caches_are_refused():
    views = make_views(SPEC, KVCacheLayout.LBHNC, 6)
    longer = make_views(SPEC, KVCacheLayout.LBHNC, 7)
    with pytest.raises(PlanError, match="layer 1"):
        block_digests([views[0], longer[1]], [1], 1)
    with pytest.raises(PlanError, match="layer 1"):
        block_digests([views[0], views[1].float()], [1], 1)
    with pytest.raises(PlanError, match="layer 0: content"):
        block_digests([views[0].transpose(2, 3)], [1], 1)
    with pytest.raises(PlanError):
        block_digests([], [1], 1)


# --- a prompt's, of all groups --------------------------------------------------------------------

GROUPS = [
    KVCacheSpec(2, 2, 3, 1, "bfloat16", 4),
    KVCacheSpec(1, 1, 5, 0, "float32", 4, GroupKind.SLIDING, 6),
]


def write(view, table, token, content):
    view[table.at(token // 4), :, token % 4] = content


def computed(layouts, tables, num_prompt, seed):
    """A cache that a prompt was written to token by token, rings and all."""
    driver = HostDriver(4096)
    names = [KVCacheLayout(name) for name in layouts]
    cache = KVCache(driver, CacheGeometry.build(GROUPS, names, [12, 12], 4096))
    cache.extend([12, 12])
    for index, spec in enumerate(GROUPS):
        kv = make_kv(spec, num_prompt, seed + index)
        for token, content in enumerate(kv):
            for view, layer in zip(cache.views[index], content, strict=True):
                write(view, tables[index], token, layer)
    return cache


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 12, 19, 21])
def test_digests_of_a_prompt_are_those_of_what_travels_wherever_it_lies(num_prompt):
    held = [[spec.blocks_held(num_prompt + more, step) for spec in GROUPS] for more, step in
            ((0, 8), (9, 1))]  # fmt: skip
    ours = [BlockTable(list(range(1, 1 + n))) for n in held[0]]
    theirs = [BlockTable(list(range(11, 11 - n, -1))) for n in held[1]]
    caches = [
        computed(["LBNHC", "BLHNC"], ours, num_prompt, 5),
        computed(["BHLNC", "LHBNC"], theirs, num_prompt, 5),
    ]
    try:
        digests = [
            prompt_digests(cache, tables, num_prompt)
            for cache, tables in zip(caches, (ours, theirs), strict=True)
        ]
        assert digests[0] == digests[1]
        kept = [spec.kept(num_prompt) for spec in GROUPS]
        assert len(digests[0]) == sum(map(len, kept))
        assert digests[0][: len(kept[0])] == block_digests(
            caches[0].views[0], ours[0].ids(kept[0]), num_prompt
        )
        for group, view in ((0, caches[1].views[0][1]), (1, caches[1].views[1][0])):
            before = view.clone()
            write(view, theirs[group], num_prompt - 1, 77)
            changed = prompt_digests(caches[1], theirs, num_prompt)
            last = len(kept[0]) - 1 if group == 0 else len(digests[0]) - 1
            assert [i for i, d in enumerate(changed) if d != digests[0][i]] == [last]
            view.copy_(before)
    finally:
        for cache in caches:
            cache.close()


def test_digests_of_a_prompt_do_not_see_what_decode_writes_behind_it():
    tables = [BlockTable([1, 2, 3]), BlockTable([1, 2, 3])]
    cache = computed(["LBNHC", "LBNHC"], tables, 6, 5)
    try:
        before = prompt_digests(cache, tables, 6)
        for group in range(2):
            write(cache.views[group][0], tables[group], 6, 77)
        assert prompt_digests(cache, tables, 6) == before
    finally:
        cache.close()
