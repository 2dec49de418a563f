"""The block allocator, against a model that remembers who holds what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.cache.blocks import BlockAllocator, BlockCounts
from kvxfer.errors import BlocksInUse, CacheError, NoFreeBlocks

MAX_BLOCKS = 12
any_blocks = st.lists(st.integers(-1, MAX_BLOCKS + 1), max_size=4)


class AllocatorMachine(RuleBasedStateMachine):
    """Holders are multisets: `held` and `quarantined` list a block once for each reference."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(4)
        self.bound = 4
        self.held = []
        self.quarantined = []

    def free_blocks(self):
        return [b for b in range(1, self.bound) if b not in self.held + self.quarantined]

    def remove(self, owner, blocks):
        """What is left of `owner` without `blocks`, or None where it does not hold them all."""
        left = list(owner)
        for block in blocks:
            if block not in left:
                return None
            left.remove(block)
        return left

    @rule(n=st.integers(0, MAX_BLOCKS))
    def allocate(self, n):
        free = self.free_blocks()
        assert self.allocator.can_allocate(n) == (n <= len(free))
        if n <= len(free):
            granted = self.allocator.allocate(n)
            assert granted == free[:n]
            self.held += granted
        else:
            with pytest.raises(NoFreeBlocks, match=rf"\b{n} blocks.*\b{len(free)} "):
                self.allocator.allocate(n)

    @rule(num_blocks=st.integers(0, MAX_BLOCKS))
    def grow(self, num_blocks):
        if num_blocks >= self.bound:
            self.allocator.grow(num_blocks)
            self.bound = num_blocks
        else:
            with pytest.raises(CacheError, match=f"{self.bound}.*{num_blocks}"):
                self.allocator.grow(num_blocks)

    @rule(blocks=any_blocks)
    def share_any(self, blocks):
        if all(block in self.held for block in blocks):
            self.allocator.share(blocks)
            self.held += blocks
        else:
            with pytest.raises(CacheError):
                self.allocator.share(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share_held(self, data):
        self.share_any(data.draw(st.lists(st.sampled_from(self.held), max_size=3)))

    @rule(blocks=any_blocks)
    def free_any(self, blocks):
        left = self.remove(self.held, blocks)
        if left is None:
            with pytest.raises(CacheError):
                self.allocator.free(blocks)
        else:
            self.allocator.free(blocks)
            self.held = left

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_held(self, data):
        self.free_any(data.draw(st.permutations(self.held)))

    @rule(blocks=any_blocks)
    def quarantine_any(self, blocks):
        left = self.remove(self.held, blocks)
        if left is None:
            with pytest.raises(CacheError):
                self.allocator.quarantine(blocks)
        else:
            self.allocator.quarantine(blocks)
            self.held = left
            self.quarantined += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine_held(self, data):
        order = data.draw(st.permutations(self.held))
        self.quarantine_any(order[: data.draw(st.integers(1, len(order)))])

    @rule(blocks=any_blocks)
    def release_any(self, blocks):
        left = self.remove(self.quarantined, blocks)
        if left is None:
            with pytest.raises(CacheError):
                self.allocator.release_quarantined(blocks)
        else:
            self.allocator.release_quarantined(blocks)
            self.quarantined = left

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release_quarantined(self, data):
        self.release_any([data.draw(st.sampled_from(self.quarantined))])

    @invariant()
    def counts_agree(self):
        counts = self.allocator.counts()
        used = set(self.held)
        assert counts == BlockCounts(
            free=len(self.free_blocks()),
            used=len(used),
            quarantined=len(set(self.quarantined) - used),
            cached=0,
            null=1,
            total=self.bound,
        )
        assert counts.free == self.allocator.num_free
        assert self.bound == self.allocator.num_blocks
        self.allocator.check_conservation()


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestAllocatorAgainstModel = AllocatorMachine.TestCase


def test_freed_blocks_are_granted_lowest_first():
    allocator = BlockAllocator(8)
    assert allocator.allocate(7) == [1, 2, 3, 4, 5, 6, 7]
    allocator.free([6, 2, 4])
    assert allocator.allocate(2) == [2, 4]
    allocator.grow(10)
    assert allocator.allocate(3) == [6, 8, 9]


def test_a_shared_block_is_free_after_its_last_holder():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(1)
    allocator.share(blocks)
    allocator.free(blocks)
    assert allocator.num_free == 1
    allocator.free(blocks)
    assert allocator.num_free == 2
    with pytest.raises(CacheError, match="block 1 "):
        allocator.free(blocks)


def test_quarantined_blocks_come_back_only_when_released():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    allocator.quarantine(blocks)
    with pytest.raises(CacheError):
        allocator.free(blocks)
    with pytest.raises(NoFreeBlocks):
        allocator.allocate(1)
    allocator.release_quarantined([2])
    assert allocator.allocate(1) == [2]


def test_a_quarantined_block_that_another_caller_shares_waits_for_both():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.share(blocks)
    allocator.quarantine(blocks)
    assert (allocator.counts().used, allocator.counts().quarantined) == (1, 0)
    allocator.free(blocks)
    assert (allocator.counts().used, allocator.counts().quarantined) == (0, 1)
    allocator.release_quarantined(blocks)
    assert allocator.num_free == 1


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (method, wrong)
        for method in ("free", "quarantine", "release_quarantined", "share")
        for wrong in ([0], [1, 3], [2, 2], [-1], [99])
        if (method, wrong) != ("share", [2, 2])  # sharing twice is allowed
    ],
)
def test_a_refused_call_changes_nothing(method, wrong):
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    if method == "release_quarantined":
        allocator.quarantine([1, 2])
    before = allocator.counts()
    with pytest.raises(CacheError):
        getattr(allocator, method)(wrong)
    assert allocator.counts() == before


def test_numbers_without_meaning_are_refused():
    with pytest.raises(CacheError):
        BlockAllocator(0)
    allocator = BlockAllocator(4)
    assert not allocator.can_allocate(-1)
    with pytest.raises(CacheError):
        allocator.allocate(-1)
    assert allocator.num_free == 3


def test_conservation_notices_a_lost_and_a_doubled_block():
    lost = BlockAllocator(4)
    lost._free.remove(2)
    with pytest.raises(CacheError, match="3 blocks"):
        lost.check_conservation()
    doubled = BlockAllocator(4)
    doubled.allocate(1)
    doubled._free.append(1)
    with pytest.raises(CacheError, match="5 blocks"):
        doubled.check_conservation()
    both = BlockAllocator(4)
    both.allocate(1)
    both._free.remove(2)
    both._free.append(1)
    with pytest.raises(CacheError, match=r"\[2\]"):
        both.check_conservation()


# --- a bound that is lowered ----------------------------------------------------------------------


def test_lowering_needs_the_blocks_above_to_be_free():
    blocks = BlockAllocator(10)
    held = blocks.allocate(6)
    blocks.quarantine(held[4:])
    for bound, used, quarantined in ((1, 4, 2), (5, 0, 2), (6, 0, 1), (3, 2, 2)):
        with pytest.raises(BlocksInUse, match="block 6 the highest") as error:
            blocks.lower(bound)
        assert (error.value.used, error.value.quarantined) == (used, quarantined)
        assert blocks.num_blocks == 10
        blocks.check_conservation()
    blocks.lower(7)
    assert (blocks.num_blocks, blocks.num_free, blocks.counts().total) == (7, 0, 7)
    blocks.check_conservation()
    blocks.free(held[:4])
    blocks.release_quarantined(held[4:])
    assert blocks.allocate(6) == held
    blocks.grow(9)
    assert blocks.allocate(2) == [7, 8]


@pytest.mark.parametrize("bound", [0, -1, 11])
def test_a_bound_is_lowered_to_one_that_can_be(bound):
    blocks = BlockAllocator(10)
    with pytest.raises(CacheError, match=f"the bound is 10 blocks, not raised to {bound}"):
        blocks.lower(bound)


def test_withheld_blocks_are_not_granted_and_come_back():
    blocks = BlockAllocator(10)
    held = blocks.allocate(7)
    blocks.withhold(4)
    assert blocks.num_free == 0
    assert blocks.counts().free == 2
    blocks.free(held)
    blocks.check_conservation()
    assert blocks.counts().free == 9
    assert not blocks.can_allocate(4)
    assert blocks.allocate(3) == [1, 2, 3]
    with pytest.raises(NoFreeBlocks):
        blocks.allocate(1)
    blocks.withhold(10)
    assert blocks.allocate(6) == [4, 5, 6, 7, 8, 9]
    blocks.check_conservation()


def test_withheld_blocks_may_be_lifted_and_are_withheld_again_when_they_come_back():
    blocks = BlockAllocator(10)
    blocks.withhold(4)
    blocks.lift(2)
    assert blocks.num_free == 5
    held = blocks.allocate(5)
    assert held == [1, 2, 3, 4, 5]
    blocks.free(held)
    blocks.check_conservation()
    assert (blocks.num_free, blocks.counts().free) == (3, 9)
    blocks.lift(100)
    assert blocks.allocate(9) == [*range(1, 10)]
    with pytest.raises(NoFreeBlocks):
        blocks.allocate(1)
    blocks.check_conservation()


def test_lowering_above_what_is_withheld_gives_the_rest_back():
    blocks = BlockAllocator(10)
    blocks.withhold(3)
    blocks.lower(6)
    assert blocks.allocate(5) == [1, 2, 3, 4, 5]
    blocks.check_conservation()
