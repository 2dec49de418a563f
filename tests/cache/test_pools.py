"""The blocks of several groups: together or not at all, against a model that knows every holder."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.cache.blocks import BlockCounts
from kvxfer.cache.pools import BlockPools, reaches
from kvxfer.errors import BlocksInUse, CacheError, NoFreeBlocks

NUM_GROUPS = 3
MAX_BLOCKS = 9
counts = st.tuples(*[st.integers(0, 5)] * NUM_GROUPS)
bounds = st.tuples(*[st.integers(1, MAX_BLOCKS)] * NUM_GROUPS)


class PoolsMachine(RuleBasedStateMachine):
    """`held` and `quarantined` list what allocations hold: one list of block ids a group each."""

    def __init__(self):
        super().__init__()
        self.pools = BlockPools(NUM_GROUPS)
        self.bounds = [1] * NUM_GROUPS
        self.limits = [1] * NUM_GROUPS
        self.held = []
        self.quarantined = []

    def taken(self, group):
        return {block for one in self.held + self.quarantined for block in one[group]}

    def free_blocks(self, group):
        end = min(self.bounds[group], self.limits[group])
        return [b for b in range(1, end) if b not in self.taken(group)]

    @rule(wanted=bounds)
    def grow(self, wanted):
        self.pools.grow(wanted)
        self.bounds = [max(pair) for pair in zip(wanted, self.bounds, strict=True)]
        self.limits = list(self.bounds)

    @rule(wanted=counts)
    def allocate(self, wanted):
        free = [self.free_blocks(group) for group in range(NUM_GROUPS)]
        lacking = [max(0, n - len(ids)) for n, ids in zip(wanted, free, strict=True)]
        assert self.pools.missing(wanted) == lacking
        assert self.pools.can_allocate(wanted) == (lacking == [0] * NUM_GROUPS)
        if any(lacking):
            with pytest.raises(NoFreeBlocks, match=r"asked for \[.*\] blocks, \[.*\] are free"):
                self.pools.allocate(wanted)
            return
        granted = self.pools.allocate(wanted)
        assert granted == [ids[:n] for n, ids in zip(wanted, free, strict=True)]
        self.held.append(granted)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pools.free(self.held.pop(index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_part(self, data):
        """What a window has left behind is given back while the rest is in use."""
        one = data.draw(st.sampled_from(self.held))
        part = [ids[: data.draw(st.integers(0, len(ids)))] for ids in one]
        self.pools.free(part)
        for ids, gone in zip(one, part, strict=True):
            del ids[: len(gone)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.quarantined.append(self.held.pop(index))
        self.pools.quarantine(self.quarantined[-1])

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.quarantined) - 1))
        self.pools.release_quarantined(self.quarantined.pop(index))

    @rule(limits=bounds)
    def withhold(self, limits):
        self.pools.withhold(limits)
        self.limits = list(limits)

    @rule(wanted=bounds)
    def lower(self, wanted):
        wanted = [min(pair) for pair in zip(wanted, self.bounds, strict=True)]
        above = any(
            block >= bound
            for group, bound in enumerate(wanted)
            for block in self.taken(group)
        )  # fmt: skip
        if above:
            for refused in (self.pools.check_unused, self.pools.lower):
                with pytest.raises(BlocksInUse):
                    refused(wanted)
            return
        self.pools.check_unused(wanted)
        self.pools.lower(wanted)
        self.bounds, self.limits = list(wanted), list(wanted)

    @invariant()
    def agrees(self):
        assert self.pools.num_blocks == self.bounds
        taken = [self.taken(group) for group in range(NUM_GROUPS)]
        assert self.pools.bounds_in_use() == [1 + max(ids, default=0) for ids in taken]
        used = sum(len(ids) for one in self.held for ids in one)
        quarantined = sum(len(ids) for one in self.quarantined for ids in one)
        total = sum(self.bounds)
        assert self.pools.counts() == BlockCounts(
            free=total - NUM_GROUPS - used - quarantined,
            used=used,
            quarantined=quarantined,
            cached=0,
            null=NUM_GROUPS,
            total=total,
        )
        self.pools.check_conservation()


PoolsMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, derandomize=True
)
TestPoolsAgainstModel = PoolsMachine.TestCase


@pytest.mark.parametrize("short", range(NUM_GROUPS))
def test_one_group_that_is_short_costs_the_others_nothing(short):
    pools = BlockPools(NUM_GROUPS)
    pools.grow([3 if group == short else 8 for group in range(NUM_GROUPS)])
    before = pools.counts()
    with pytest.raises(NoFreeBlocks):
        pools.allocate([3] * NUM_GROUPS)
    assert pools.counts() == before
    expected = [[1, 2] if group == short else [1, 2, 3] for group in range(NUM_GROUPS)]
    assert pools.allocate([2 if group == short else 3 for group in range(NUM_GROUPS)]) == expected


def test_growth_of_one_group_never_lowers_another():
    pools = BlockPools(2)
    pools.grow([5, 1])
    pools.grow([2, 7])
    assert pools.num_blocks == [5, 7]


@pytest.mark.parametrize("group", range(2))
def test_a_group_that_is_in_use_above_keeps_all_bounds(group):
    pools = BlockPools(2)
    pools.grow([8, 8])
    pools.allocate([5 if group == index else 1 for index in range(2)])
    with pytest.raises(BlocksInUse):
        pools.lower([4, 4])
    assert pools.num_blocks == [8, 8]
    pools.check_conservation()


@pytest.mark.parametrize(
    ("blocks", "bounds", "answer"),
    [
        ([[1, 2], [3]], [3, 4], False),
        ([[1, 2], [3]], [2, 4], True),
        ([[1, 2], [3]], [3, 3], True),
        ([[2, 1], []], [3, 0], False),
        ([[], []], [0, 0], False),
        ([[], [0]], [1, 0], True),
    ],
)
def test_blocks_reach_a_bound_that_one_of_them_lies_at_or_above(blocks, bounds, answer):
    assert reaches(blocks, bounds) is answer


@pytest.mark.parametrize(
    "call, counts", [("allocate", [1, -1]), ("lower", [2, 0]), ("lower", [2, 9])]
)
def test_nonsense_for_a_later_group_changes_no_earlier_one(call, counts):
    pools = BlockPools(2)
    pools.grow([8, 8])
    with pytest.raises(CacheError):
        getattr(pools, call)(counts)
    assert pools.num_blocks == [8, 8]
    assert (pools.counts().free, pools.counts().used) == (14, 0)
