"""What a budget means in blocks of several groups, against counting block by block."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvxfer.cache.budget import CacheBudget
from kvxfer.cache.footprint import blocks_needed
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec

BUDGET = settings(max_examples=examples(20, 80), deadline=None, derandomize=True)


@st.composite
def any_specs(draw, min_groups=1):
    kinds = draw(st.lists(st.sampled_from(list(GroupKind)), min_size=min_groups, max_size=4))
    return [
        KVCacheSpec(
            draw(st.integers(1, 4)),
            1,
            draw(st.integers(1, 4)),
            draw(st.integers(0, 3)),
            draw(st.sampled_from(["float32", "bfloat16"])),
            draw(st.integers(1, 6)),
            kind,
            draw(st.integers(1, 30)) if kind is GroupKind.SLIDING else 0,
        )
        for kind in kinds
    ]


@st.composite
def budgets(draw, min_groups=1):
    specs = draw(any_specs(min_groups))
    capacities = [draw(st.integers(2, 60)) for _ in specs]
    layouts = [KVCacheLayout.LBNHC] * len(specs)
    geometry = CacheGeometry.build(specs, layouts, capacities, 64)
    return CacheBudget(geometry, draw(st.integers(0, 12_000)), draw(st.integers(1, 20)))


def cost(budget, num_blocks):
    return sum(
        blocks * group.spec.num_layers * group.spec.page_bytes
        for group, blocks in zip(budget.geometry.groups, num_blocks, strict=True)
    )


def capacities_of(budget):
    return [group.capacity_blocks for group in budget.geometry.groups]


def highest(one, other):
    return [max(pair) for pair in zip(one, other, strict=True)]


def needs(budget, num_tokens):
    """Blocks of each group for one sequence and the null block."""
    return [1 + spec.blocks_held(num_tokens, budget.step_tokens) for spec in budget.geometry.specs]


@BUDGET
@given(budgets(), st.integers(0, 150))
def test_the_longest_sequence_is_the_largest_that_fits_alone(budget, limit):
    def fits(num_tokens):
        wanted = needs(budget, num_tokens)
        within = zip(wanted, capacities_of(budget), strict=True)
        return cost(budget, wanted) <= budget.kv_bytes and all(n <= most for n, most in within)

    expected = max((n for n in range(1, limit + 1) if fits(n)), default=0)
    assert budget.longest_sequence(limit) == expected


@BUDGET
@given(budgets(), st.integers(0, 150))
def test_a_floor_is_one_sequence_and_the_null_block(budget, num_tokens):
    wanted = needs(budget, num_tokens)
    expected = [min(pair) for pair in zip(wanted, capacities_of(budget), strict=True)]
    assert budget.floors(num_tokens) == expected


@BUDGET
@given(budgets(), st.integers(1, 60), st.data())
def test_a_floor_holds_any_request_of_as_many_tokens(budget, num_tokens, data):
    """However they are divided between prompt and answer, with an encoder or without."""
    num_prompt = data.draw(st.integers(1, num_tokens))
    specs = budget.geometry.specs
    wanted = blocks_needed(specs, num_prompt, num_tokens - num_prompt, budget.step_tokens)
    for blocks, floor, most in zip(
        wanted, budget.floors(num_tokens), capacities_of(budget), strict=True
    ):
        assert 1 + blocks <= floor or floor == most


@st.composite
def clips(draw):
    """A budget that pays for what is committed and for each group's floor."""
    budget = draw(budgets())
    counts = [st.integers(0, most) for most in capacities_of(budget)]
    committed, floors, wanted = (list(draw(st.tuples(*counts))) for _ in range(3))
    spare = draw(st.integers(0, 3_000))
    kv_bytes = cost(budget, highest(committed, floors)) + spare
    return dataclasses.replace(budget, kv_bytes=kv_bytes), wanted, committed, floors


@BUDGET
@given(clips())
def test_clipping_stays_within_the_budget_and_takes_from_nobody(case):
    budget, wanted, committed, floors = case
    found = budget.clip(wanted, committed, floors)
    assert cost(budget, highest(found, floors)) <= budget.kv_bytes, "each still has its floor"
    for index, blocks in enumerate(found):
        assert committed[index] <= blocks <= max(committed[index], wanted[index])
        assert blocks <= budget.geometry.groups[index].capacity_blocks


@BUDGET
@given(clips())
def test_clipping_grants_block_by_block_as_long_as_there_is_budget(case):
    budget, wanted, committed, floors = case
    granted = list(committed)
    for index in range(len(granted)):
        while granted[index] < wanted[index]:
            next_one = [n + (i == index) for i, n in enumerate(granted)]
            others = highest(next_one, floors)
            others[index] = next_one[index]
            if cost(budget, others) > budget.kv_bytes:
                break
            granted = next_one
    assert budget.clip(wanted, committed, floors) == granted


@BUDGET
@given(clips(), st.integers(1, 2_000))
def test_a_budget_that_is_overdrawn_grants_nothing_and_takes_nothing(case, missing):
    """As when memory that peers pin counts against it."""
    budget, wanted, committed, floors = case
    lowered = cost(budget, highest(committed, floors)) - missing
    assume(committed == highest(committed, floors))
    poor = dataclasses.replace(budget, kv_bytes=max(0, lowered))
    assert poor.clip(wanted, committed, floors) == committed


# --- all of it, from the start --------------------------------------------------------------------


@st.composite
def shared(draw):
    """A budget, and floors that it pays for."""
    budget = draw(budgets())
    floors = budget.floors(draw(st.integers(1, 40)))
    kv_bytes = cost(budget, floors) + draw(st.integers(0, 20_000))
    return dataclasses.replace(budget, kv_bytes=kv_bytes), floors


@BUDGET
@given(shared(), st.integers(1, 40))
def test_shares_are_within_the_budget_the_capacities_and_above_the_floors(case, num_sequences):
    budget, floors = case
    found = budget.shares(floors, num_sequences)
    assert cost(budget, found) <= budget.kv_bytes
    for blocks, floor, most in zip(found, floors, capacities_of(budget), strict=True):
        assert floor <= blocks <= most


@BUDGET
@given(shared(), st.integers(1, 40))
def test_shares_leave_nothing_that_the_first_could_use(case, num_sequences):
    budget, floors = case
    found = budget.shares(floors, num_sequences)
    groups = budget.geometry.groups
    full = [index for index, group in enumerate(groups) if not group.spec.window]
    first = full[0] if full else 0
    left = budget.kv_bytes - cost(budget, found)
    is_full = found[first] == groups[first].capacity_blocks
    assert is_full or left < groups[first].spec.block_bytes


@BUDGET
@given(shared(), st.integers(1, 40))
def test_windows_get_what_their_sequences_hold_and_half_of_the_rest_at_most(case, num_sequences):
    budget, floors = case
    groups = budget.geometry.groups
    windowed = [bool(group.spec.window) for group in groups]
    assume(any(windowed) and not all(windowed))
    found = budget.shares(floors, num_sequences)
    more = [(n - floor) * w for n, floor, w in zip(found, floors, windowed, strict=True)]
    assert 2 * cost(budget, more) <= budget.kv_bytes - cost(budget, floors)
    for blocks, floor, is_windowed in zip(found, floors, windowed, strict=True):
        if is_windowed:
            assert blocks <= 1 + num_sequences * (floor - 1)


@BUDGET
@given(shared(), st.integers(1, 40))
def test_one_group_alone_gets_exactly_what_its_bytes_buy(case, num_sequences):
    budget, _ = case
    group = budget.geometry.groups[0]
    geometry = CacheGeometry.build(
        [group.spec], [group.layout], [group.capacity_blocks], group.granularity
    )
    alone = dataclasses.replace(budget, geometry=geometry)
    floors = alone.floors(1)
    bought = budget.kv_bytes // group.spec.block_bytes
    expected = max(floors[0], min(bought, group.capacity_blocks))
    assert alone.shares(floors, num_sequences) == [expected]


FULL = KVCacheSpec(2, 1, 4, 4, "float32", 4)
SLIDING = KVCacheSpec(6, 1, 4, 4, "float32", 4, GroupKind.SLIDING, 8)


def example(specs, kv_blocks, capacity=10_000):
    """A budget of `kv_blocks` blocks of the first spec."""
    layouts, capacities = [KVCacheLayout.LBNHC] * len(specs), [capacity] * len(specs)
    geometry = CacheGeometry.build(specs, layouts, capacities, 64)
    return CacheBudget(geometry, kv_blocks * specs[0].block_bytes, 4)


def test_groups_without_a_window_run_low_together():
    twice = dataclasses.replace(FULL, block_size=2)
    budget = example([FULL, twice, FULL], 1000)
    floors = budget.floors(40)
    assert floors == [11, 21, 11]
    found = budget.shares(floors, 16)
    ratios = [blocks / floor for blocks, floor in zip(found, floors, strict=True)]
    assert max(ratios) - min(ratios) < 0.2
    assert cost(budget, found) == budget.kv_bytes


@pytest.mark.parametrize("num_sequences", [1, 2, 8])
def test_a_window_has_room_for_all_sequences_where_there_is_enough(num_sequences):
    budget = example([FULL, SLIDING], 4000)
    floors = budget.floors(400)
    found = budget.shares(floors, num_sequences)
    assert found[1] == 1 + num_sequences * SLIDING.blocks_held(400, 4)
    assert found[0] == (budget.kv_bytes - found[1] * SLIDING.block_bytes) // FULL.block_bytes


def test_groups_that_all_have_windows_share_like_any():
    budget = example([SLIDING, dataclasses.replace(SLIDING, window=16)], 300)
    found = budget.shares(budget.floors(400), 2)
    assert sum(found) == 300


@pytest.mark.parametrize("at", [0, 1])
def test_a_floor_that_is_not_paid_for_is_not_lowered(at):
    budget = example([FULL, SLIDING], 3)
    floors = [5, 1] if at == 0 else [1, 5]
    assert budget.shares(floors, 4) == floors
