"""The pattern that stands in for a model says when KV is wrong."""

import itertools

import pytest
import torch

from kvxfer.bench.null_engine import PatternModel
from kvxfer.bench.null_tokens import NUM_LAYERS, VOCAB_SIZE, answer, levels
from kvxfer.cache.table import BlockTable
from kvxfer.model.packing import SequenceStep
from kvxfer.model.sampling import SampleSpec

BLOCK = 4
PROMPT = [(37 * i + 5) % VOCAB_SIZE for i in range(11)]
BLOCKS = [5, 2, 7, 3]
GREEDY = SampleSpec(0.0, 1.0, 0)


def prefilled():
    """A model whose prompt is computed in two chunks: (model, views, table, first token)."""
    model = PatternModel()
    views = [torch.zeros(9, 2, BLOCK, 8) for _ in range(NUM_LAYERS)]
    model.bind([views])
    table = BlockTable(BLOCKS)
    assert model.prefill_chunk(SequenceStep(PROMPT[:8], 0, [table], None)) is None
    return model, views, table, model.prefill_chunk(SequenceStep(PROMPT[8:], 8, [table], GREEDY))


def test_it_answers_what_the_bench_expects():
    model, _, table, token = prefilled()
    output = [token]
    while len(output) < 4:
        position = len(PROMPT) + len(output) - 1
        output += model.decode_step([SequenceStep(output[-1:], position, [table], GREEDY)])
    assert output == answer(PROMPT, 4)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_one_wrong_element_or_two_exchanged_blocks_give_another_token(layer):
    model, views, table, token = prefilled()
    step = [SequenceStep([token], len(PROMPT), [table], GREEDY)]
    right = model.decode_step(step)
    assert right == answer(PROMPT, 2)[1:]
    kept = views[layer].clone()
    for block, head, slot, content in [(5, 1, 3, 7), (2, 0, 0, 0), (7, 1, 1, 2)]:
        views[layer][block, head, slot, content] += 1
        assert model.decode_step(step) != right
        views[layer].copy_(kept)
    views[layer][5], views[layer][2] = kept[2], kept[5]
    assert model.decode_step(step) != right


def test_levels_tell_places_apart():
    """Of one token at all places that a soak uses, and exact in float32."""
    for token in (0, 500):
        found = list(itertools.chain(*(levels([token] * 100, 0, n) for n in range(NUM_LAYERS))))
        assert len(set(found)) == len(found)
        assert max(found) < 1 << 24
