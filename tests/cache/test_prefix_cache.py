"""Cached blocks against a model that lists who was freed when, and prefixes against all prompts
that were ever computed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import examples

from kvxfer.cache.blocks import BlockAllocator, BlockCounts
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.prefix_cache import (
    PrefixCache,
    block_hashes,
    why_no_prefix_cache,
    why_not_cached,
)
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import BlocksInUse, CacheError, NoFreeBlocks

MAX_BLOCKS = 9
KEYS = [bytes([n]) for n in range(6)]
bounds = st.integers(1, MAX_BLOCKS)


class CachingMachine(RuleBasedStateMachine):
    """`held` and `quarantined` list a block once a reference, `idle` what nobody holds and what is
    cached, in the order of freeing."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(6)
        self.bound = self.limit = 6
        self.held, self.quarantined, self.idle = [], [], []
        self.contents = {}

    def free_blocks(self):
        taken = self.held + self.quarantined + self.idle
        return [b for b in range(1, self.bound) if b not in taken]

    def forget(self, blocks):
        for block in blocks:
            self.contents.pop(block, None)
        self.idle = [block for block in self.idle if block in self.contents]

    @rule(n=st.integers(0, MAX_BLOCKS))
    def allocate(self, n):
        free = [block for block in self.free_blocks() if block < self.limit]
        assert self.allocator.num_free == len(free) + len(self.idle)
        if n > self.allocator.num_free:
            with pytest.raises(NoFreeBlocks):
                self.allocator.allocate(n)
            return
        evicted = self.idle[: max(0, n - len(free))]
        self.forget(evicted)
        granted = self.allocator.allocate(n)
        assert granted == sorted(free[:n] + evicted)
        self.held += granted

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def cache(self, data, key):
        self.cache_one(data.draw(st.sampled_from(self.held)), key)

    def cache_one(self, block, key):
        self.allocator.cache(block, key)
        is_known = block in self.contents or key in self.contents.values()
        if block < self.limit and block not in self.quarantined and not is_known:
            self.contents[block] = key

    @precondition(lambda self: self.held)
    @rule()
    def cache_and_free_all(self):
        for block, key in zip(dict.fromkeys(self.held), KEYS, strict=False):
            self.cache_one(block, key)
        self.free_these(list(self.held))

    @rule(more=st.integers(1, 2))
    def evict(self, more):
        self.allocate(sum(block < self.limit for block in self.free_blocks()) + more)

    @rule(key=st.sampled_from(KEYS))
    def share_found(self, key):
        found = self.allocator.find_first([key])
        if not found:
            return
        (block,) = found
        assert self.contents[block] == key
        self.allocator.share([block])
        self.held.append(block)
        self.idle = [other for other in self.idle if other != block]

    @rule(block=st.integers(0, MAX_BLOCKS))
    def share_any(self, block):
        if block in self.held or block in self.idle:
            self.allocator.share([block])
            self.held.append(block)
            self.idle = [other for other in self.idle if other != block]
        else:
            with pytest.raises(CacheError):
                self.allocator.share([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        order = data.draw(st.permutations(self.held))
        self.free_these(order[: data.draw(st.integers(1, len(order)))])

    def free_these(self, blocks):
        self.allocator.free(blocks)
        for block in blocks:
            self.held.remove(block)
        for block in reversed(list(dict.fromkeys(blocks))):
            if block in self.contents and block not in self.held:
                self.idle.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data):
        block = data.draw(st.sampled_from(self.held))
        self.allocator.quarantine([block])
        self.held.remove(block)
        self.quarantined.append(block)
        self.forget([block])

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self):
        self.allocator.release_quarantined([self.quarantined.pop()])

    @rule(limit=bounds)
    def withhold(self, limit):
        self.allocator.withhold(limit)
        self.limit = limit
        self.forget(range(limit, MAX_BLOCKS + 1))

    @rule(bound=bounds)
    def lower(self, bound):
        bound = min(bound, self.bound)
        if any(block >= bound for block in self.held + self.quarantined):
            with pytest.raises(BlocksInUse):
                self.allocator.lower(bound)
            return
        self.allocator.lower(bound)
        self.bound = self.limit = bound
        self.forget(range(bound, MAX_BLOCKS + 1))

    @rule(bound=bounds)
    def grow(self, bound):
        self.bound = self.limit = max(bound, self.bound)
        self.allocator.grow(self.bound)

    @invariant()
    def agrees(self):
        used, quarantined = set(self.held), set(self.quarantined)
        assert self.allocator.counts() == BlockCounts(
            free=len(self.free_blocks()),
            used=len(used),
            quarantined=len(quarantined - used),
            cached=len(self.idle),
            null=1,
            total=self.bound,
        )
        assert self.allocator.bound_in_use == 1 + max(used | quarantined, default=0)
        blocks = {key: block for block, key in self.contents.items()}
        for key in KEYS:
            expected = [blocks[key]] if key in blocks else []
            assert self.allocator.find_first([key]) == expected
        self.allocator.check_conservation()


CachingMachine.TestCase.settings = settings(
    max_examples=examples(30, 80), stateful_step_count=30, deadline=None, derandomize=True
)
TestCachingAgainstModel = CachingMachine.TestCase

N = 2
FULL = KVCacheSpec(1, 1, 8, 8, "float32", N)
MLA = KVCacheSpec(2, 1, 8, 0, "float32", N, GroupKind.MLA)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class Prompts:
    """Jobs over a cache of two groups; `memory` is what each block really holds: the tokens up to
    its end, or nothing that is whole."""

    def __init__(self, num_blocks):
        self.pools = BlockPools(2)
        self.pools.grow([num_blocks, num_blocks + 1])
        self.cache = PrefixCache(self.pools, (FULL, MLA))
        self.memory = [{}, {}]
        self.running = []

    def begin(self, tokens):
        """The blocks and the cached tokens, or None where it has to wait."""
        hashes, needed = self.cache.hashes(tokens), [-(-len(tokens) // N)] * 2
        prefix = self.cache.lookup(hashes, len(tokens))
        assert len(prefix[0]) == len(prefix[1]) <= (len(tokens) - 1) // N
        for group, ids in enumerate(prefix):
            for entry, block in enumerate(ids):
                assert self.memory[group][block] == tokens[: (entry + 1) * N], "never wrong KV"
        before = self.pools.counts()
        if not self.pools.can_allocate(self.cache.cost(needed, prefix)):
            with pytest.raises(NoFreeBlocks):
                self.cache.allocate(needed, prefix)
            assert self.pools.counts() == before
            return None
        blocks = self.cache.allocate(needed, prefix)
        for group, (ids, old) in enumerate(zip(blocks, prefix, strict=True)):
            assert ids[: len(old)] == old
            fresh = ids[len(old) :]
            assert len({*ids}) == len(ids) == needed[group]
            held = {block for _, other in self.running for block in other[group]}
            assert not held & {*fresh}, "somebody reads them"
            for block in fresh:
                self.memory[group][block] = None
        self.running.append((tokens, blocks))
        return blocks, len(prefix[0]) * N

    def compute(self, tokens, blocks, start, stop):
        for group, ids in enumerate(blocks):
            for entry in range(start // N, stop // N):
                self.memory[group][ids[entry]] = tokens[: (entry + 1) * N]
        self.cache.insert(self.cache.hashes(tokens), blocks, range(start, stop))

    def end(self, index):
        _, blocks = self.running.pop(index)
        self.pools.free(blocks)


def common_blocks(one, other):
    """Whole blocks at the beginning of both."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(same)) // N


@settings(max_examples=examples(20, 60), deadline=None, derandomize=True)
@given(st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 6)), max_size=14))
def test_the_longest_beginning_that_was_computed_is_found_while_there_is_room(requests):
    """Some are given up after a few blocks: what they did finish is known, and no more."""
    jobs, computed = Prompts(num_blocks=14 * 6 + 1), []
    for tokens, ends, num_blocks in requests:
        blocks, cached = jobs.begin(tokens)
        best = max((common_blocks(tokens, other) for other in computed), default=0)
        assert cached == min(best, (len(tokens) - 1) // N) * N
        stop = min(len(tokens), cached + num_blocks * N)
        jobs.compute(tokens, blocks, cached, stop)
        computed.append(tokens[:stop])
        if ends:
            jobs.end(0)
        jobs.pools.check_conservation()
    while jobs.running:
        jobs.end(0)
    counts = jobs.pools.counts()
    assert counts.free + counts.cached + counts.null == counts.total
    assert counts.cached == 2 * len({tuple(c[: e * N]) for c in computed for e in blocks_of(c)})


def blocks_of(tokens):
    return range(1, len(tokens) // N + 1)


@settings(max_examples=examples(20, 60), deadline=None, derandomize=True)
@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=25), st.integers(7, 14))
def test_where_blocks_are_few_nothing_wrong_is_found_and_nothing_in_use_is_evicted(
    requests, num_blocks
):
    jobs = Prompts(num_blocks)
    for tokens, num_ending in requests:
        found = jobs.begin(tokens)
        if found is not None:
            jobs.compute(tokens, *found, len(tokens))
        for _ in range(min(num_ending, len(jobs.running))):
            jobs.end(0)
        jobs.pools.check_conservation()
    while jobs.running:
        jobs.end(0)
    longest = [-(-11 // N)] * 2
    assert jobs.pools.can_allocate(longest), "cached blocks are in nobody's way"


def test_the_end_of_a_prompt_goes_before_its_beginning():
    jobs = Prompts(num_blocks=6)
    jobs.compute([1] * 9, *jobs.begin([1] * 9), 9)
    jobs.end(0)
    assert [len(ids) for ids in jobs.cache.lookup(jobs.cache.hashes([1] * 9), 9)] == [4, 4]
    jobs.begin([0] * 6)
    assert [len(ids) for ids in jobs.cache.lookup(jobs.cache.hashes([1] * 9), 9)] == [2, 2]


def test_a_prefix_in_use_costs_nothing_and_one_that_is_idle_its_blocks():
    jobs = Prompts(num_blocks=9)
    jobs.compute([1] * 8, *jobs.begin([1] * 8), 8)
    hashes = jobs.cache.hashes([1] * 11)
    prefix = jobs.cache.lookup(hashes, 11)
    assert jobs.cache.cost([6, 6], prefix) == [2, 2]
    jobs.end(0)
    assert jobs.cache.cost([6, 6], prefix) == [6, 6]


def test_a_hash_stands_for_all_tokens_before_its_block():
    tokens = list(range(10))
    hashes = block_hashes(tokens, 4)
    assert len({*hashes}) == len(hashes) == 2
    assert hashes == block_hashes(tokens[:8], 4)
    for index in range(8):
        other = block_hashes([t + (i == index) for i, t in enumerate(tokens)], 4)
        assert [a == b for a, b in zip(hashes, other, strict=True)] == [index >= 4, False]


@pytest.mark.parametrize(
    ("specs", "why_not"),
    [
        ((FULL, MLA), ""),
        ((FULL, KVCacheSpec(1, 1, 8, 8, "float32", N, GroupKind.SLIDING, 6)), "sliding"),
        ((FULL, KVCacheSpec(1, 1, 8, 8, "float32", N, GroupKind.CROSS)), "cross"),
        ((FULL, KVCacheSpec(1, 1, 8, 8, "float32", 4)), "blocks of [2, 4] tokens"),
    ],
)
def test_it_is_off_where_not_every_group_keeps_all(specs, why_not):
    assert why_not in why_no_prefix_cache(specs)
    assert bool(why_no_prefix_cache(specs)) == bool(why_not)
    pools = BlockPools(2)
    assert bool(PrefixCache(pools, specs).hashes([1] * 9)) != bool(why_not)
    assert PrefixCache(pools, specs, is_on=False).hashes([1] * 9) == []


def test_hashes_go_on_from_those_that_are_known():
    tokens = list(range(23))
    hashes = block_hashes(tokens, 4)
    for count in range(6):
        assert block_hashes(tokens, 4, hashes[:count]) == hashes


@pytest.mark.parametrize(
    ("specs", "num_cached", "num_prompt", "why_not"),
    [
        ((FULL, MLA), 0, 9, ""),
        ((FULL, MLA), 8, 9, ""),
        ((FULL, MLA), 8, 8, "8 of a prompt of 8"),
        ((FULL, MLA), 10, 9, "10 of a prompt of 9"),
        ((FULL, MLA), -2, 9, "-2 of a prompt of 9"),
        ((FULL, MLA), 3, 9, "3 are not blocks of 2"),
        ((FULL, MLA), 0, 0, ""),
        ((KVCacheSpec(1, 1, 8, 8, "float32", N, GroupKind.SLIDING, 6),), 0, 9, ""),
        ((KVCacheSpec(1, 1, 8, 8, "float32", N, GroupKind.SLIDING, 6),), 2, 9, "sliding"),
    ],
)
def test_how_much_of_a_prompt_another_cache_can_have(specs, num_cached, num_prompt, why_not):
    found = why_not_cached(specs, num_cached, num_prompt)
    assert why_not in found
    assert bool(found) == bool(why_not)


def test_only_what_one_caller_holds_and_nobody_can_find_may_be_written_to():
    pools = BlockPools(2)
    pools.grow([6, 6])
    held = pools.allocate([3, 3])
    pools.check_exclusive(held)
    pools.groups[1].cache(held[1][2], KEYS[0])
    with pytest.raises(CacheError, match=f"block {held[1][2]} .*cached: True"):
        pools.check_exclusive(held)
    pools.check_exclusive([held[0], held[1][:2]])
    pools.share([held[0][:1], []])
    with pytest.raises(CacheError, match="2 references"):
        pools.check_exclusive([held[0], []])
    pools.quarantine([held[0][:1], []])
    with pytest.raises(CacheError, match="quarantined: True"):
        pools.check_exclusive([held[0], []])
    with pytest.raises(CacheError, match="0 references"):
        pools.check_exclusive([[5], []])


def test_what_a_peer_may_still_write_to_is_not_cached():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.cache(blocks[0], KEYS[0])
    allocator.share(blocks)
    allocator.quarantine(blocks)
    assert allocator.find_first(KEYS[:1]) == []
    allocator.cache(blocks[0], KEYS[0])
    assert allocator.find_first(KEYS[:1]) == [], "another holds it, but the quarantine does too"
    allocator.free(blocks)
    allocator.release_quarantined(blocks)
    assert (allocator.counts().free, allocator.counts().cached) == (3, 0)
    allocator.check_conservation()
