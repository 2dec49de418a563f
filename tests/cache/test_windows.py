"""Rings of blocks and what is kept of them, against sequences that are played token by token.

A played group writes each token's number to the slot that its table says, and each query looks at
all that it sees: a block that was taken over too early shows as a wrong number.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.cache.footprint import (
    blocks_needed,
    decoder_start,
    has_encoder,
    kv_tokens,
    prompt_chunks,
    prompt_entries,
    travelling,
)
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import CacheError

BUDGET = settings(max_examples=examples(40, 150), deadline=None, derandomize=True)
windows = st.integers(0, 40)
block_sizes = st.integers(1, 9)
steps = st.integers(1, 24)
lengths = st.integers(0, 120)


def make_spec(window, block_size):
    kind = GroupKind.SLIDING if window else GroupKind.FULL
    return KVCacheSpec(1, 1, 1, 0, "float32", block_size, kind, window)


def seen(spec, position):
    """What attention lets a query see, from its definition."""
    window = spec.window or position + 1
    return [token for token in range(position + 1) if position - token < window]


class Played:
    """One sequence in one group."""

    def __init__(self, spec, num_tokens, step_tokens):
        self.spec = spec
        self.num_blocks = spec.blocks_held(num_tokens, step_tokens)
        self.table = BlockTable([100 + 7 * i for i in range(self.num_blocks)])
        self.memory = {}
        self.read = set()
        """Tokens that some query has seen."""

    def slot(self, token):
        return self.table.at(token // self.spec.block_size), token % self.spec.block_size

    def compute(self, tokens):
        """One step: all KV is written, then each token looks."""
        for token in tokens:
            self.memory[self.slot(token)] = token
        for query in tokens:
            for token in seen(self.spec, query):
                assert self.memory[self.slot(token)] == token, f"{query} sees another {token}"
                self.read.add(token)

    def bring(self, other, tokens):
        """A hand-over of `tokens` from `other`, as they are there now."""
        for token in tokens:
            assert other.memory[other.slot(token)] == token, f"{token} is gone at its source"
            self.memory[self.slot(token)] = token


def cut(num_tokens, sizes):
    """[0, num_tokens) in steps of `sizes`, again and again."""
    start, index = 0, 0
    while start < num_tokens:
        stop = min(num_tokens, start + sizes[index % len(sizes)])
        yield range(start, stop)
        start, index = stop, index + 1


@BUDGET
@given(windows, block_sizes, st.lists(steps, min_size=1, max_size=4), lengths)
def test_no_query_sees_a_block_that_was_taken_over(window, block_size, sizes, length):
    spec = make_spec(window, block_size)
    played = Played(spec, length, max(sizes))
    assert played.num_blocks <= spec.num_blocks(length)
    for tokens in cut(length, sizes):
        played.compute(tokens)
    assert played.read == set(range(length))


@BUDGET
@given(windows, block_sizes, steps, lengths)
def test_one_block_fewer_would_not_do(window, block_size, step, length):
    """Of a sequence that is long enough to meet every alignment of steps and blocks."""
    spec = make_spec(window, block_size)
    length += window + step + 2 * block_size
    most = 0
    for start in range(length):
        last = min(length, start + step) - 1
        most = max(most, last // block_size - seen(spec, start)[0] // block_size + 1)
    assert spec.blocks_held(length, step) == most


@BUDGET
@given(windows, block_sizes, lengths, st.integers(1, 60))
def test_what_is_kept_is_what_later_queries_see(window, block_size, length, more):
    spec = make_spec(window, block_size)
    later = {
        token // block_size
        for query in range(length, length + more)
        for token in seen(spec, query)
        if token < length
    }
    kept = spec.kept(length)
    assert kept.stop == spec.num_blocks(length)
    if window == 1:
        assert later <= set(kept)
        assert len(kept) <= 1  # a block that was begun is kept to be filled
    else:
        assert set(kept) == later
    assert spec.first_seen(length) == seen(spec, length)[0]


@BUDGET
@given(
    windows,
    block_sizes,
    steps,
    st.integers(1, 100),
    st.integers(1, 60),
    st.booleans(),
    st.integers(1, 8),
)
def test_a_hand_over_brings_what_decode_reads_and_nothing_else(
    window, block_size, chunk, num_prompt, num_new, at_once, decode_step
):
    """Prefill in chunks, KV that travels after each (or as late as after the last), decode."""
    spec = make_spec(window, block_size)
    source = Played(spec, num_prompt, chunk)
    target = Played(spec, num_prompt + num_new, decode_step)
    travelled = []
    for computed in prompt_chunks([spec], num_prompt, chunk):
        source.compute(computed)
        (tokens,) = travelling([spec], num_prompt, computed)
        travelled += tokens
        if at_once:
            target.bring(source, tokens)
    if not at_once:
        target.bring(source, travelled)
    for tokens in cut(num_new, [decode_step]):
        target.compute(range(tokens.start + num_prompt, tokens.stop + num_prompt))
    (entries,) = prompt_entries([spec], num_prompt)
    of_prompt = {token // block_size for token in target.read if token < num_prompt}
    if window != 1:
        assert of_prompt == set(entries)
    assert travelled == list(range(entries.start * block_size, num_prompt))
    assert len(set(target.table.ids(entries))) == len(entries) == len(source.table.ids(entries))


# --- tables ---------------------------------------------------------------------------------------


def test_a_ring_goes_round():
    table = BlockTable([5, 9, 2])
    assert [table.at(entry) for entry in range(7)] == [5, 9, 2, 5, 9, 2, 5]
    assert table.ids(range(4, 7)) == [9, 2, 5]
    assert table.ids(range(4, 4)) == []


def test_more_entries_than_blocks_cannot_be_there_at_once():
    with pytest.raises(CacheError, match="4 entries of a table of 3 blocks"):
        BlockTable([5, 9, 2]).ids(range(3, 7))


def test_without_a_window_an_entry_has_a_block_of_its_own():
    spec = make_spec(0, 4)
    for length in range(40):
        assert spec.blocks_held(length, 1) == spec.num_blocks(length)
        assert spec.kept(length) == range(spec.num_blocks(length))


# --- footprints of several groups -----------------------------------------------------------------

FULL = KVCacheSpec(2, 2, 4, 4, "float32", 4)
SLIDING = KVCacheSpec(3, 1, 4, 4, "float32", 3, GroupKind.SLIDING, 7)
LATENT = KVCacheSpec(1, 1, 9, 0, "float32", 8, GroupKind.MLA)
CROSS = KVCacheSpec(2, 2, 4, 4, "float32", 5, GroupKind.CROSS)
MODELS = {
    "decoder": [FULL],
    "hybrid": [FULL, SLIDING],
    "three": [SLIDING, LATENT, dataclasses.replace(SLIDING, window=2)],
    "encoder": [FULL, CROSS],
    "encoder-hybrid": [CROSS, SLIDING, FULL],
}
every_model = pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS)


def expected_tokens(specs, num_prompt, num_new):
    """How many of a group's KV there are: an encoder's prompt is in the CROSS groups alone."""
    in_decoder = num_new + (1 if CROSS in specs else num_prompt)
    return [num_prompt if spec is CROSS else in_decoder for spec in specs]


@every_model
@pytest.mark.parametrize("num_prompt", [1, 2, 8, 9, 31])
@pytest.mark.parametrize("num_new", [0, 1, 17])
def test_tokens_and_blocks_of_a_request(specs, num_prompt, num_new):
    tokens = expected_tokens(specs, num_prompt, num_new)
    assert kv_tokens(specs, num_prompt, num_new) == tokens
    assert has_encoder(specs) == (CROSS in specs)
    assert decoder_start(specs, num_prompt) == (1 if CROSS in specs else num_prompt)
    for step in (1, 6):
        assert blocks_needed(specs, num_prompt, num_new, step) == [
            spec.blocks_held(n, step) for spec, n in zip(specs, tokens, strict=True)
        ]


@every_model
@BUDGET
@given(num_prompt=st.integers(0, 60), chunk=st.integers(1, 20))
def test_chunks_are_the_prompt_from_first_to_last(specs, num_prompt, chunk):
    chunks = prompt_chunks(specs, num_prompt, chunk)
    assert [token for computed in chunks for token in computed] == list(range(num_prompt))
    assert all(chunks)
    if CROSS in specs:
        assert len(chunks) <= 1  # an encoder sees all of it at once
    else:
        assert all(len(computed) == chunk for computed in chunks[:-1])
        assert all(len(computed) <= chunk for computed in chunks)


@every_model
@BUDGET
@given(num_prompt=st.integers(1, 60), chunk=st.integers(1, 20))
def test_every_kept_token_of_every_group_travels_exactly_once(specs, num_prompt, chunk):
    travelled = [[] for _ in specs]
    for computed in prompt_chunks(specs, num_prompt, chunk):
        found = travelling(specs, num_prompt, computed)
        for spec, tokens, all_tokens in zip(specs, found, travelled, strict=True):
            if CROSS not in specs or spec is CROSS:
                assert set(tokens) <= set(computed), "nothing that is not there yet"
            all_tokens += tokens
    lengths = expected_tokens(specs, num_prompt, 0)
    for spec, tokens, length in zip(specs, travelled, lengths, strict=True):
        first = spec.kept(length).start * spec.block_size
        assert tokens == list(range(first, length))


@every_model
@BUDGET
@given(num_prompt=st.integers(1, 60), num_new=st.integers(1, 40), chunk=st.integers(1, 20))
def test_both_ends_have_room_for_what_a_hand_over_brings(specs, num_prompt, num_new, chunk):
    source = blocks_needed(specs, num_prompt, 0, chunk)
    target = blocks_needed(specs, num_prompt, num_new, 1)
    for entries, theirs, ours in zip(
        prompt_entries(specs, num_prompt), source, target, strict=True
    ):
        assert len(entries) <= min(theirs, ours)


def test_a_prompt_of_an_encoder_that_is_not_all_computed_brings_no_start():
    """The decoder's first KV exists when the encoder is done."""
    specs = MODELS["encoder"]
    assert travelling(specs, 10, range(10)) == [range(1), range(10)]
    assert list(travelling(specs, 10, range(5))[0]) == []
    assert list(travelling(specs, 10, range(10, 10))[0]) == []
