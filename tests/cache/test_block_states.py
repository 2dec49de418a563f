"""Blocks as numbers and runs, for pictures."""

import itertools

import numpy as np
import pytest

from kvxfer.cache.block_states import BlockState, counts, mark, runs
from kvxfer.cache.blocks import BlockAllocator

NULL, FREE, CACHED, USED, QUARANTINED, IN_FLIGHT = BlockState


def test_each_block_is_in_the_state_that_the_allocator_counts_it_in():
    blocks = BlockAllocator(12)
    held, kept, given_up = blocks.allocate(3), blocks.allocate(2), blocks.allocate(2)
    blocks.share(held[:1])
    for block in kept:
        blocks.cache(block, bytes([block]))
    blocks.free(kept)
    blocks.quarantine(given_up)
    blocks.withhold(10)
    states = blocks.states()
    expected = [NULL, *[USED] * 3, *[CACHED] * 2, *[QUARANTINED] * 2, *[FREE] * 4]
    assert states.tolist() == expected
    told = blocks.counts()
    assert counts(states) == [1, told.free, told.cached, told.used, told.quarantined, 0]


def test_a_block_that_is_held_and_in_quarantine_too_is_used():
    blocks = BlockAllocator(3)
    held = blocks.allocate(1)
    blocks.share(held)
    blocks.quarantine(held)
    assert blocks.states().tolist() == [NULL, USED, FREE]


def test_only_blocks_in_the_state_that_is_named_are_marked():
    states = np.array([NULL, USED, FREE, QUARANTINED, USED], np.uint8)
    mark(states, [1, 2, 3, 9], IN_FLIGHT, USED)
    assert states.tolist() == [NULL, IN_FLIGHT, FREE, QUARANTINED, USED]


def expanded(found):
    return list(itertools.chain(*([state] * n for state, n in found)))


def test_runs_are_the_states_themselves_where_they_are_few():
    states = np.array([NULL, USED, USED, FREE, FREE, FREE], np.uint8)
    scale, found = runs(states, 10)
    assert (scale, found) == (1, [(NULL, 1), (USED, 2), (FREE, 3)])


@pytest.mark.parametrize("most", [1, 2, 3, 50, 2048])
def test_runs_are_bounded_and_a_cell_is_the_highest_of_its_blocks(most):
    states = np.random.default_rng(1).integers(0, 6, 1001, np.uint8)
    scale, found = runs(states, most)
    assert len(found) <= most
    cells = [max(states[at : at + scale]) for at in range(0, len(states), scale)]
    assert expanded(found) == cells
    assert scale == 1 or len(runs_at(states, scale // 2)) > most, "no coarser than it has to be"


def runs_at(states, scale):
    cells = [max(states[at : at + scale]) for at in range(0, len(states), scale)]
    return list(itertools.groupby(cells))
