from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import ModelError, UsageError
from kvxfer.model.choosing import choose
from kvxfer.model.packing import SequenceStep
from kvxfer.model.sampling import SampleSpec, nucleus, sample

logit_lists = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40)
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 1 << 20)


def test_greedy_takes_the_lowest_id_of_equals():
    assert sample(torch.tensor([1.0, 3.0, 2.0, 3.0]), 0, SampleSpec()) == 1
    assert sample(torch.tensor([2.0, 3.0, 3.0], dtype=torch.bfloat16), 9, SampleSpec(seed=4)) == 1


@given(logit_lists, positions, seeds, st.floats(1e-300, 5), st.floats(0.01, 1))
def test_the_same_seed_and_position_give_the_same_token(logits, position, seed, heat, top_p):
    spec = SampleSpec(heat, top_p, seed)
    first = sample(torch.tensor(logits), position, spec)
    torch.manual_seed(position)
    np.random.seed(seed % 2**32)
    assert sample(torch.tensor(logits), position, spec) == first


def brute_force_nucleus(logits, temperature, top_p):
    """Ids from the highest logit down, lowest id first among equals, until their sum is top_p."""
    scores = [(x - max(logits)) / temperature for x in logits]
    total, kept, reached = math.fsum(map(math.exp, scores)), set(), 0.0
    for token in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if kept and reached >= top_p:
            break
        kept.add(token)
        reached += math.exp(scores[token]) / total
    return kept


@given(logit_lists, st.floats(0.05, 0.999))
@example(logits=[-4e-45, 0.0], top_p=0.5)
def test_the_nucleus_is_the_shortest_that_reaches_top_p(logits, top_p):
    scores = np.array(logits, dtype=np.float64) - max(logits)
    found = set(np.flatnonzero(np.isfinite(nucleus(scores, top_p))).tolist())
    # The two sums may round to either side of top_p; no token in between is that unlikely.
    allowed = [brute_force_nucleus(logits, 1.0, top_p + slack) for slack in (-1e-9, 1e-9)]
    assert found in allowed


@given(logit_lists, positions, seeds, st.floats(0.1, 3), st.floats(0.05, 0.999))
def test_no_token_comes_from_outside_the_nucleus(logits, position, seed, heat, top_p):
    kept = brute_force_nucleus(logits, heat, top_p + 1e-9)
    assert sample(torch.tensor(logits), position, SampleSpec(heat, top_p, seed)) in kept


def test_seeds_and_positions_draw_apart():
    logits = torch.zeros(1000)
    by_position = [sample(logits, p, SampleSpec(1.0)) for p in range(200)]
    by_seed = [sample(logits, 0, SampleSpec(1.0, seed=s)) for s in range(200)]
    # 200 draws of 1000: about 181 distinct are expected, with a deviation of 4.
    assert len(set(by_position)) > 160
    assert len(set(by_seed)) > 160


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_says(vary, temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 2.0])
    draws = 6000
    counts = torch.zeros(6)
    for i in range(draws):
        position, seed = (i, 3) if vary == "position" else (17, i)
        counts[sample(logits, position, SampleSpec(temperature, seed=seed))] += 1
    expected = torch.softmax(logits / temperature, 0) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 20.5, "5 degrees of freedom: 20.5 is passed by one sampler in a thousand"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_values_that_are_refused(field, value):
    with pytest.raises(UsageError) as caught:
        SampleSpec(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token(bad):
    with pytest.raises(ModelError, match="logits for position 7"):
        sample(torch.tensor([0.0, bad, 1.0]), 7, SampleSpec(1.0))


@pytest.mark.parametrize("num_told", [1, 2, 30])
def test_a_prompt_with_its_answer_is_continued_as_the_answer_was(num_told):
    """After a preemption prefill says what decode would have: both count from the first token."""
    info = SimpleNamespace(is_encoder_decoder=False)
    logits, spec = torch.zeros(1, 500), SampleSpec(1.0, 1.0, 7)
    tokens = [3] * (10 + num_told)
    decoded = SequenceStep(tokens[-1:], len(tokens) - 1, [], spec)
    prefilled = SequenceStep(tokens, 0, [], spec)
    last_chunk = SequenceStep(tokens[8:], 8, [], spec)
    next_one = SequenceStep(tokens[-1:], len(tokens), [], spec)
    (found,) = choose(info, [decoded], logits)
    assert choose(info, [prefilled], logits) == choose(info, [last_chunk], logits) == [found]
    assert choose(info, [next_one], logits) != [found]
