"""The choice of a pair: what a full search would choose from, and what each number does to it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.serve import pairing
from kvxfer.serve.pairing import DecodeSide, PrefillSide, choose_one, choose_pair, pair_cost

RATES = st.floats(1.0, 1e6)
COUNTS = st.integers(0, 1 << 20)
PREFILLS = st.builds(
    PrefillSide,
    tokens_queued=COUNTS,
    tokens_uncached=st.integers(1, 1 << 17),
    tokens_per_s=RATES,
    lacks_blocks=st.booleans(),
)
DECODES = st.builds(
    DecodeSide,
    queue_wait_s=st.floats(0, 1e3),
    num_requests=st.integers(0, 1000),
    max_new_tokens=st.integers(1, 1 << 12),
    tokens_per_s=RATES,
    num_bytes=st.integers(0, 1 << 34),
    lacks_blocks=st.booleans(),
)
IDLE_PREFILL = PrefillSide(0, 1000, 10_000.0, False)
IDLE_DECODE = DecodeSide(0.0, 0, 10, 1000.0, 1 << 20, False)


@st.composite
def fleets(draw):
    prefills = draw(st.lists(PREFILLS, min_size=1, max_size=6))
    decodes = draw(st.lists(DECODES, min_size=1, max_size=6))
    row = st.lists(
        st.just(0.0) | st.floats(1e3, 1e12), min_size=len(decodes), max_size=len(decodes)
    )
    rates = draw(st.lists(row, min_size=len(prefills), max_size=len(prefills)))
    return prefills, decodes, rates


def near_best(prefills, decodes, rates):
    """Every pair that is nearly best, by looking at all."""
    costs = {
        (p, d): pair_cost(prefill, decode, rates[p][d])
        for p, prefill in enumerate(prefills)
        for d, decode in enumerate(decodes)
    }
    limit = pairing.nearly(min(costs.values()))
    return {pair for pair, cost in costs.items() if cost <= limit}


class Every(random.Random):
    """Takes what it is offered instead of choosing."""

    def choice(self, offered):
        self.offered = {tuple(one) for one in offered}
        return offered[-1]


@given(fleets())
def test_one_of_all_those_that_are_nearly_best_is_taken(fleet):
    prefills, decodes, rates = fleet
    chance = Every()
    found = choose_pair(prefills, decodes, lambda p, d: rates[p][d], chance)
    assert chance.offered == near_best(prefills, decodes, rates)
    assert found in chance.offered


@given(fleets())
def test_the_order_of_the_workers_decides_nothing(fleet):
    prefills, decodes, rates = fleet
    chance = Every()
    choose_pair(prefills, decodes, lambda p, d: rates[p][d], chance)
    turned = Every()
    last_p, last_d = len(prefills) - 1, len(decodes) - 1
    choose_pair(prefills[::-1], decodes[::-1], lambda p, d: rates[last_p - p][last_d - d], turned)
    assert {(last_p - p, last_d - d) for p, d in turned.offered} == chance.offered


@pytest.mark.parametrize(
    "worse",
    [
        {"tokens_queued": 5000},
        {"tokens_uncached": 4000},
        {"tokens_per_s": 1000.0},
        {"lacks_blocks": True},
    ],
)
def test_what_makes_a_prefill_worker_worse(worse):
    fields = {name: getattr(IDLE_PREFILL, name) for name in IDLE_PREFILL.__slots__}
    prefills = [PrefillSide(**fields | worse), IDLE_PREFILL]
    for seed in range(20):
        pair = choose_pair(prefills, [IDLE_DECODE], lambda p, d: 1e9, random.Random(seed))
        assert pair == (1, 0)


@pytest.mark.parametrize(
    "worse",
    [
        {"queue_wait_s": 0.5},
        {"num_requests": 30},
        {"num_bytes": 1 << 30},
        {"lacks_blocks": True},
    ],
)
def test_what_makes_a_decode_worker_worse(worse):
    fields = {name: getattr(IDLE_DECODE, name) for name in IDLE_DECODE.__slots__}
    decodes = [DecodeSide(**fields | worse), IDLE_DECODE]
    for seed in range(20):
        pair = choose_pair([IDLE_PREFILL], decodes, lambda p, d: 1e9, random.Random(seed))
        assert pair == (0, 1)


@pytest.mark.parametrize("slow", [1e6, 0.0])
def test_a_slow_lane_or_none_makes_a_pair_worse(slow):
    rates = {(0, 0): slow, (0, 1): 1e9, (1, 0): 1e9, (1, 1): slow}
    sides = [IDLE_PREFILL] * 2, [IDLE_DECODE] * 2
    pairs = {
        choose_pair(*sides, lambda p, d: rates[p, d], random.Random(seed)) for seed in range(40)
    }
    assert pairs == {(0, 1), (1, 0)}


def test_equal_pairs_are_all_taken():
    sides = [IDLE_PREFILL] * 2, [IDLE_DECODE] * 3
    pairs = {choose_pair(*sides, lambda p, d: 1e9, random.Random(seed)) for seed in range(200)}
    assert len(pairs) == 6


def test_one_side_alone():
    assert {choose_one([5.0, 1.0, 1.05], random.Random(seed)) for seed in range(40)} == {1, 2}


def test_of_many_workers_the_quickest_are_looked_at_and_of_equals_any():
    asked = []

    def rate(prefill, decode):
        asked.append((prefill, decode))
        return 1e9

    chance, taken = random.Random(1), set()
    prefills, decodes = [IDLE_PREFILL] * 200, [IDLE_DECODE] * 300
    for _ in range(200):
        taken.add(choose_pair(prefills, decodes, rate, chance))
    assert len(asked) <= 200 * pairing.MOST_OF_A_SIDE**2
    assert len({prefill for prefill, _ in taken}) > 100
    assert len({decode for _, decode in taken}) > 120
    cached = PrefillSide(0, 1, 10_000.0, False)
    prefills[150], decodes[17] = cached, IDLE_DECODE
    assert {choose_pair(prefills, decodes, rate, chance)[0] for _ in range(20)} == {150}
