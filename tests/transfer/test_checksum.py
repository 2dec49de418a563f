"""Checksums against a definition in big integers: equal for equal KV, different for anything else.

The kernel runs in Triton's interpreter, which costs by the operation: few examples of it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import PlanError, UsageError
from kvxfer.memory.host import HostDriver
from kvxfer.transfer.checksum import (
    DigestPolicy,
    combined,
    kv_checksum,
    should_check,
    start_checksum,
)
from kvxfer.transfer.checksum_shard import MIX, KVShard, checked_stretch, mix_in_place

GOLDEN = 0xFE78B35B4D29726B
FIRST_DRAWN = ["request-22", "request-32", "request-33"]
BUDGET = settings(max_examples=examples(10, 25), deadline=None, derandomize=True)
FEW = settings(max_examples=8, deadline=None, derandomize=True)
MODULUS = 1 << 64
SPEC = KVCacheSpec(2, 4, 4, 4, "bfloat16", 4)
"""Two words of 8 bytes a row."""
NUM_TOKENS = 22


def interpreted_sum(shard, blocks, tokens, layers=None, first_entry=0):
    """By the kernel, in Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    from kvxfer.transfer.checksum_kernel import device_sum, is_interpreted

    if not is_interpreted():
        pytest.skip("TRITON_INTERPRET is off: tests/gpu runs the kernel")
    stretch = checked_stretch(shard, blocks, tokens, layers, first_entry)
    return int(device_sum(shard, stretch)) % MODULUS if stretch else 0


def mixed(value):
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % MODULUS
    return value ^ value >> 31


def expected_sum(kv, tokens, layers, heads, group=0):
    """Of kv [T, L, H, C], word by word, as the module's docstring has it."""
    golden, found = 0x9E3779B97F4A7C15, 0
    row_bytes = kv.shape[3] * kv.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    for token, layer, head in itertools.product(tokens, layers, heads):
        plane = group << 48 | layer << 24 | head
        key = mixed((mixed((plane + 1) * golden % MODULUS) + token * golden) % MODULUS)
        row = bytes(kv[token, layer, head].view(torch.uint8).tolist())
        for at in range(0, row_bytes, size):
            word = int.from_bytes(row[at : at + size], "little")
            found += mixed(word ^ (key + at // size * golden) % MODULUS)
    return found % MODULUS


def make_kv(spec, num_tokens, seed=0):
    """[T, L, H, C] of random bytes: NaNs of all kinds are among them."""
    shape = (num_tokens, spec.num_layers, spec.num_kv_heads, spec.content_dim * spec.itemsize)
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=source, dtype=torch.uint8).view(
        getattr(torch, spec.dtype)
    )


def raw(tensor):
    """Its bits, to be copied and compared as they are."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def make_views(spec, layout, capacity, seed=1):
    """Per-layer [B, H, N, C] views of a cache in which every byte, the padding too, is garbage."""
    geometry = GroupGeometry.build(spec, layout, capacity, 64)
    source = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (geometry.total_bytes,), generator=source, dtype=torch.uint8)
    memory = memory.view(getattr(torch, spec.dtype))
    stride_l, *strides = (stride // spec.itemsize for stride in geometry.strides)
    shape = (capacity, spec.num_kv_heads, spec.block_size, spec.content_dim)
    return [memory.as_strided(shape, strides, i * stride_l) for i in range(spec.num_layers)]


def fill(views, blocks, kv, tokens, first_entry=0):
    """Write those of kv [T, L, H, C] as the blocks' tokens."""
    size = views[0].shape[2]
    for token, (layer, view) in itertools.product(tokens, enumerate(views)):
        block = blocks[token // size - first_entry]
        raw(view)[block, :, token % size] = raw(kv)[token, layer]


def filled(spec, layout, kv, blocks, seed=1):
    views = make_views(spec, layout, max(blocks) + 2, seed)
    fill(views, blocks, kv, range(len(kv)))
    return KVShard(views, spec.num_kv_heads)


def with_block_size(block_size):
    return KVCacheSpec(2, 4, 4, 4, "bfloat16", block_size)


@st.composite
def cases(draw):
    """A shard of random heads, group and layout, with a stretch of a table, and its sum."""
    spec = KVCacheSpec(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(["float8_e5m2", "bfloat16", "float32"])),
        draw(st.integers(1, 5)),
    )
    first_entry, num_blocks = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    begin, end = (entry * spec.block_size for entry in (first_entry, first_entry + num_blocks))
    tokens = range(*sorted(draw(st.tuples(*[st.integers(begin, end)] * 2))))
    layers = range(*sorted(draw(st.tuples(*[st.integers(0, spec.num_layers)] * 2))))
    first_head, others = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    group, layout = draw(st.integers(0, 63)), draw(st.sampled_from(list(KVCacheLayout)))
    blocks = draw(st.permutations(range(7)))[:num_blocks]
    kv, views = make_kv(spec, end), make_views(spec, layout, 7)
    fill(views, blocks, kv, tokens, first_entry)
    shard = KVShard(views, first_head + spec.num_kv_heads + others, first_head, group)
    shifted = torch.cat([raw(kv)[:, :, :1].expand(-1, -1, first_head, -1), raw(kv)], dim=2)
    heads = range(first_head, first_head + spec.num_kv_heads)
    expected = expected_sum(shifted, tokens, layers, heads, group)
    return (shard, blocks, tokens, layers), first_entry, expected


@BUDGET
@given(cases())
def test_the_sum_is_as_defined(case):
    arguments, first_entry, expected = case
    assert kv_checksum(*arguments, first_entry=first_entry) == expected


@FEW
@given(cases())
def test_the_kernel_sums_as_defined(case):
    arguments, first_entry, expected = case
    assert interpreted_sum(*arguments, first_entry=first_entry) == expected


@pytest.mark.parametrize("content", [96, 20])
def test_the_kernel_shares_tiles_among_programs_and_columns(content):
    """Rows of 24 and 5 words, more tokens than a tile has rows, blocks that are no power of two."""
    spec = KVCacheSpec(2, 2, content, content, "bfloat16" if content == 20 else "float8_e5m2", 12)
    kv = make_kv(spec, 300)
    blocks = torch.randperm(27, generator=torch.Generator().manual_seed(3)).tolist()
    for layout in (KVCacheLayout.LHBNC, KVCacheLayout.BLNHC):
        shard = filled(spec, layout, kv, blocks)
        for tokens, layers in ((range(7, 299), range(2)), (range(100, 101), range(1, 2))):
            found = interpreted_sum(shard, blocks, tokens, layers)
            assert found == kv_checksum(shard, blocks, tokens, layers)


def test_every_layout_and_block_size_has_the_same():
    """Equal among all, so between each of the 36 pairs, at ratios of 1/4 to 4."""
    kv, found = make_kv(SPEC, NUM_TOKENS), set()
    for layout, size in itertools.product(KVCacheLayout, (2, 4, 8)):
        spec = with_block_size(size)
        blocks = list(range(1, spec.num_blocks(NUM_TOKENS) + 1))[::-1]
        shard = filled(spec, layout, kv, blocks, seed=size)
        found.add(kv_checksum(shard, blocks, range(NUM_TOKENS)))
    assert found == {expected_sum(kv, range(NUM_TOKENS), range(2), range(4))}


def test_the_kernel_too():
    kv, found = make_kv(SPEC, NUM_TOKENS), set()
    for layout, size in zip(KVCacheLayout, (2, 4, 8, 2, 4, 8), strict=True):
        spec = with_block_size(size)
        blocks = list(range(1, spec.num_blocks(NUM_TOKENS) + 1))[::-1]
        shard = filled(spec, layout, kv, blocks, seed=size)
        found.add(interpreted_sum(shard, blocks, range(NUM_TOKENS)))
    assert found == {expected_sum(kv, range(NUM_TOKENS), range(2), range(4))}


BLOCKS = [5, 1, 6, 2, 7, 3]
"""Of SPEC's 4 tokens, for NUM_TOKENS."""


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_pieces_add_up(layout):
    """Heads of ranks that hold them for themselves, chunks of tokens, ranges of layers."""
    kv = make_kv(SPEC, NUM_TOKENS)
    whole = filled(SPEC, layout, kv, BLOCKS)
    total = kv_checksum(whole, BLOCKS, range(NUM_TOKENS))
    ranks = []
    for first in (0, 1, 3):
        heads = {0: 1, 1: 2, 3: 1}[first]
        spec = KVCacheSpec(2, heads, 4, 4, "bfloat16", 8)
        views = make_views(spec, layout, 4, seed=first)
        fill(views, [2, 0, 3], kv[:, :, first : first + heads], range(NUM_TOKENS))
        shard = KVShard(views, SPEC.num_kv_heads, first)
        ranks.append(kv_checksum(shard, [2, 0, 3], range(NUM_TOKENS)))
        narrowed = KVShard([v[:, first : first + heads] for v in whole.views], 4, first)
        assert kv_checksum(narrowed, BLOCKS, range(NUM_TOKENS)) == ranks[-1]
    assert combined(ranks) == total
    chunks = [range(1), range(1, 9), range(9, 9), range(9, 16), range(16, 22)]
    assert combined(kv_checksum(whole, BLOCKS, chunk) for chunk in chunks) == total
    by_layer = [kv_checksum(whole, BLOCKS, range(22), range(i, i + 1)) for i in range(2)]
    assert combined(by_layer) == total
    assert len({total, *ranks, *by_layer}) == 6


def test_groups_count_apart():
    """Two groups that hold the same: swapped, or one twice, is another sum."""
    views = filled(SPEC, KVCacheLayout.LBHNC, make_kv(SPEC, NUM_TOKENS), BLOCKS).views
    sums = [
        kv_checksum(KVShard(views, 4, group=group), BLOCKS, range(NUM_TOKENS)) for group in (0, 1)
    ]
    assert sums[0] != sums[1]


def swap(kv, one, other):
    """Exchange kv[one] and kv[other]."""
    kept = kv[one].clone()
    kv[one] = kv[other]
    kv[other] = kept


def corrupt(kind, kv, draw):
    """Harm kv, int16 [T, L, H, C] of SPEC's, in place."""
    token, other = draw(st.permutations(range(NUM_TOKENS)))[:2]
    layer, head = draw(st.integers(0, 1)), draw(st.integers(0, 3))
    if kind == "bit":
        kv[token, layer, head, draw(st.integers(0, 7))] ^= 1 << draw(st.integers(0, 14))
    elif kind == "words":
        swap(kv[token, layer, head], slice(0, 4), slice(4, 8))
    elif kind == "rows":
        swap(kv[:, layer, head], token, other)
    elif kind == "blocks":
        first, second = draw(st.permutations(range(0, 20, 4)))[:2]
        swap(kv, slice(first, first + 4), slice(second, second + 4))
    elif kind == "heads":
        swap(kv[:, layer], (slice(None), head), (slice(None), (head + 1) % 4))
    elif kind == "layers":
        swap(kv, (slice(None), 0), (slice(None), 1))
    elif kind == "shifted":
        kv[1:, layer] = kv[:-1, layer].clone()
    elif kind == "zeroed":
        kv[token // 4 * 4 : token // 4 * 4 + 4, layer] = 0
    else:
        kv[token:] = 0


KINDS = ["bit", "words", "rows", "blocks", "heads", "layers", "shifted", "zeroed", "unfinished"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", ["random", "small"])
@FEW
@given(data=st.data())
def test_corruption_shows(kind, values, data):
    """In random bytes, and in ones and zeros: most of the words are then the same."""
    kv = make_kv(SPEC, NUM_TOKENS, data.draw(st.integers(0, 99)))
    if values == "small":
        raw(kv).bitwise_and_(1)
    harmed = kv.clone()
    corrupt(kind, raw(harmed), data.draw)
    assume(not torch.equal(raw(harmed), raw(kv)))
    layout = data.draw(st.sampled_from(list(KVCacheLayout)))
    before, after = (
        kv_checksum(filled(SPEC, layout, one, BLOCKS), BLOCKS, range(NUM_TOKENS))
        for one in (kv, harmed)
    )
    assert before != after


def test_blocks_in_the_wrong_order_and_tokens_off_by_one_show():
    """What went wrong may be the table, and not the bytes."""
    shard = filled(SPEC, KVCacheLayout.LBNHC, make_kv(SPEC, 24), BLOCKS)
    swapped = [1, 5, *BLOCKS[2:]]
    tables = [(BLOCKS, range(20)), (swapped, range(20)), (BLOCKS, range(1, 21))]
    tables.append((BLOCKS[1:], range(20)))
    sums = {kv_checksum(shard, blocks, tokens) for blocks, tokens in tables}
    moved = KVShard(shard.views, 5, first_head=1)
    sums.add(kv_checksum(moved, BLOCKS, range(20)))
    assert len(sums) == 5


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_slots_out_of_range_and_other_blocks_do_not_count(layout):
    kv = make_kv(SPEC, NUM_TOKENS)
    shards = []
    for seed in (1, 2):
        views = make_views(SPEC, layout, 9, seed)
        fill(views, BLOCKS, kv, range(3, 18))
        shards.append(KVShard(views, 4))
    first, second = shards
    assert not torch.equal(raw(first.views[0]), raw(second.views[0]))
    found = {kv_checksum(shard, BLOCKS, range(3, 18)) for shard in shards}
    found |= {interpreted_sum(shard, BLOCKS, range(3, 18)) for shard in shards}
    assert len(found) == 1
    assert len({kv_checksum(shard, BLOCKS, range(3, 19)) for shard in shards}) == 2


def test_a_window_has_the_sum_of_its_tokens_wherever_its_table_begins():
    """Sliding windows keep a stretch of the table only, on both sides another one."""
    kv = make_kv(SPEC, NUM_TOKENS)
    whole = filled(SPEC, KVCacheLayout.LBHNC, kv, BLOCKS)
    spec = with_block_size(2)
    views = make_views(spec, KVCacheLayout.BHLNC, 9)
    fill(views, [4, 8, 1, 2, 6], kv, range(13, NUM_TOKENS), first_entry=6)
    found = [
        kv_checksum(whole, BLOCKS, range(13, NUM_TOKENS)),
        kv_checksum(whole, BLOCKS[3:], range(13, NUM_TOKENS), first_entry=3),
        kv_checksum(KVShard(views, 4), [4, 8, 1, 2, 6], range(13, NUM_TOKENS), first_entry=6),
    ]
    assert len(set(found)) == 1
    assert found[0] != kv_checksum(whole, BLOCKS[3:], range(1, NUM_TOKENS - 12))


def test_a_batch_of_scratch_memory_ends_between_blocks(monkeypatch):
    kv = make_kv(SPEC, NUM_TOKENS)
    shard = filled(SPEC, KVCacheLayout.LHBNC, kv, BLOCKS)
    at_once = kv_checksum(shard, BLOCKS, range(2, 21))
    for words in (1, 2 * 4 * 4 * 2, 3 * 4 * 4 * 2 + 1):
        monkeypatch.setattr("kvxfer.transfer.checksum.SCRATCH_WORDS", words)
        assert kv_checksum(shard, BLOCKS, range(2, 21)) == at_once


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BLHNC])
def test_uncommitted_memory_is_not_touched(layout):
    """Reading a block beyond the committed ones ends the process."""
    driver = HostDriver()
    spec = KVCacheSpec(2, 2, 64, 64, "bfloat16", 16)
    geometry = CacheGeometry.build([spec], [layout], [1 << 20], driver.granularity)
    cache = KVCache(driver, geometry)
    try:
        cache.extend([3])
        kv, blocks = make_kv(spec, 40), [2, 0, 1]
        fill(cache.views[0], blocks, kv, range(40))
        shard = KVShard(cache.views[0], 2)
        expected = expected_sum(kv, range(1, 40), range(2), range(2))
        assert kv_checksum(shard, blocks, range(1, 40)) == expected
        assert interpreted_sum(shard, blocks, range(1, 40)) == expected
    finally:
        cache.close()


def test_the_sum_stays_what_it_is():
    """Two sides may run different versions: change it, and they must be told apart."""
    kv = torch.arange(108, dtype=torch.float32).reshape(9, 2, 3, 2)
    spec = KVCacheSpec(2, 3, 1, 1, "float32", 4)
    shard = filled(spec, KVCacheLayout.LBNHC, kv, [1, 2, 0])
    expected = expected_sum(kv, range(1, 9), range(2), range(3))
    assert kv_checksum(shard, [1, 2, 0], range(1, 9)) == expected == GOLDEN


def test_nothing_sums_up_to_nothing_and_is_ready():
    shard = filled(SPEC, KVCacheLayout.LBHNC, make_kv(SPEC, NUM_TOKENS), BLOCKS)
    assert kv_checksum(shard, [], range(0)) == 0
    assert kv_checksum(shard, BLOCKS, range(3), range(1, 1)) == 0
    pending = start_checksum(shard, BLOCKS, range(NUM_TOKENS))
    assert pending.is_ready
    shard.views[0].zero_()
    assert pending.result() == pending.result() != kv_checksum(shard, BLOCKS, range(NUM_TOKENS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": range(25)}, r"tokens: range\(0, 25\) leaves the tokens of the block table"),
        ({"tokens": range(3, 8), "first_entry": 1}, "tokens: .* leaves .* range\\(4, 28\\)"),
        ({"tokens": range(-1, 3)}, "tokens: .* leaves"),
        ({"tokens": range(0, 8, 2)}, "tokens: .* must have step 1"),
        ({"layers": range(1, 3)}, r"layers: range\(1, 3\) leaves the layers .* range\(0, 2\)"),
        ({"layers": range(1, -1, -1)}, "layers: .* must have step 1"),
        ({"blocks": [5, 9, 6, 2, 7, 3]}, "blocks: 9 is not among the 9"),
        ({"blocks": [5, -1, 6, 2, 7, 3]}, "blocks: -1 is not among the 9"),
        ({"first_entry": -1}, "first_entry: -1 is negative"),
    ],
)
def test_what_is_out_of_range_is_refused(changes, message):
    shard = KVShard(make_views(SPEC, KVCacheLayout.LBHNC, 9), 4)
    arguments = {"blocks": BLOCKS, "tokens": range(22), **changes}
    with pytest.raises(PlanError, match=message):
        kv_checksum(shard, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: KVShard([], 4), "views: 0 layers"),
        (lambda v: KVShard([v[0], v[1][:8]], 4), "views: layer 1 has shape"),
        (lambda v: KVShard([v[0], v[1].half()], 4), "views: layer 1 has dtype torch.float16"),
        (lambda v: KVShard([v[0][0]], 4), "not \\[B, H, N, C\\]"),
        (lambda v: KVShard([v[0][:, :0]], 4), "not \\[B, H, N, C\\]"),
        (lambda v: KVShard([v[0], v[1].contiguous()], 4), "views: layer 1 has strides"),
        (lambda v: KVShard([v[0][..., ::2]], 4), "the last 1"),
        (lambda v: KVShard([v[0][..., 2:6]], 4), "does not lie on multiples of 8 bytes"),
        (lambda v: KVShard(v, 3), "first_head: heads 0 to 3 are not among the 3 of total_heads"),
        (lambda v: KVShard(v, 4, 1), "first_head: heads 1 to 4"),
        (lambda v: KVShard(v, 4, -1), "first_head: heads -1 to 2"),
        (lambda v: KVShard(v, 4, group=64), "group: 64"),
    ],
)
def test_shards_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make(make_views(SPEC, KVCacheLayout.LBNHC, 9))


def test_mixed_loses_nothing_and_every_bit_counts():
    """Undone, each value comes back; a flipped bit flips about half of the 64."""
    source = torch.Generator().manual_seed(0)
    values = torch.randint(-(1 << 63), (1 << 63) - 1, (200,), generator=source)
    values = values.numpy().view("uint64")
    found = values.copy()
    mix_in_place(found)
    first, second = (pow(factor, -1, MODULUS) for _, factor in MIX[:2])
    for value, result in zip(values.tolist(), found.tolist(), strict=True):
        result = unshifted(result, 31) * second % MODULUS
        assert unshifted(unshifted(result, 27) * first % MODULUS, 30) == value
    for bit in range(64):
        flipped = values ^ values.dtype.type(1 << bit)
        mix_in_place(flipped)
        changed = [change.bit_count() for change in (flipped ^ found).tolist()]
        assert 29 < sum(changed) / len(changed) < 35


def unshifted(value, shift):
    """x of value = x ^ x >> shift."""
    found = value
    for _ in range(64 // shift + 1):
        found = value ^ found >> shift
    return found


def test_both_sides_sample_the_same_requests():
    ids = [f"request-{i}" for i in range(1600)]
    drawn = [one for one in ids if should_check(DigestPolicy.SAMPLED, one)]
    assert 70 < len(drawn) < 130
    assert drawn[:3] == FIRST_DRAWN
    assert all(should_check(DigestPolicy.SAMPLED, one, 1) for one in ids[:50])
    assert all(should_check(DigestPolicy.ALWAYS, one) for one in ids[:50])
    assert not any(should_check(DigestPolicy.OFF, one, 1) for one in ids[:50])
    with pytest.raises(UsageError, match="sample_every: 0"):
        should_check(DigestPolicy.ALWAYS, "a", 0)
