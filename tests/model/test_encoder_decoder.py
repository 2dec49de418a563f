"""Models with an encoder: its KV lies in groups of its own, and the encoder runs once."""

from __future__ import annotations

import pytest
import torch
from support.comparing import NEW_TOKENS, assert_same, block_lists, generate, run
from support.models import ENCODER_DECODERS, HostEngine, HostSequence

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError
from kvxfer.model import SampleSpec
from kvxfer.model.runner import SequenceStep

families = pytest.mark.parametrize("family", ENCODER_DECODERS)
CROSS = 1
"""The group of cross attention; the decoder's own is 0."""


@families
def test_answers_and_logits_equal_transformers(runner_of, prompts, family):
    engine = HostEngine(runner_of(family))
    assert [spec.kind for spec in engine.specs] == [GroupKind.FULL, GroupKind.CROSS]
    distinct, firsts = set(), []
    for prompt, blocks in zip(prompts[:3], block_lists(prompts[:3]), strict=True):
        expected = generate(engine.runner.info, prompt, NEW_TOKENS)
        sequence = engine.prefill(prompt, blocks)
        again = engine.runner.logits([SequenceStep(prompt, 0, sequence.tables)])
        logits = [again]
        while len(sequence.answer) < NEW_TOKENS:
            logits.append(engine.runner.logits([engine.next_step(sequence)]))
            engine.decode([sequence], 1)
        assert sequence.answer == expected.answer
        largest = expected.logits.abs().max().item()
        found = torch.cat(logits)
        torch.testing.assert_close(found, expected.logits, rtol=1e-4, atol=1e-4 * largest)
        distinct.update(expected.answer)
        firsts.append(expected.logits[0])
    assert len(distinct) > 8, "an answer that repeats one token proves little"
    assert (firsts[0] - firsts[1]).abs().max() > 0.1, "the answer depends on the prompt"


@families
def test_prefill_here_and_decode_there_is_the_single_process_bit_by_bit(runner_of, prompts, family):
    """In other layouts, each group its own, and in one batch."""
    single = HostEngine(runner_of(family))
    expected = run(single, prompts[:4], batch=1)
    prefill = HostEngine(runner_of(family), [KVCacheLayout.BLHNC, KVCacheLayout.LHBNC])
    decode = HostEngine(runner_of(family, 1), [KVCacheLayout.LBNHC, KVCacheLayout.BHLNC])
    moved = []
    for prompt, blocks in zip(prompts[:4], block_lists(prompts[:4]), strict=True):
        sequence = prefill.prefill(prompt, blocks)
        moved.append(decode.receive(prefill, sequence, [block + 7 for block in blocks]))
    decode.decode(moved, NEW_TOKENS)
    assert_same(decode, moved, single, expected)


@families
def test_decoding_reads_the_encoder_from_the_cache(runner_of, prompts, family):
    engine = HostEngine(runner_of(family))
    sequence, other = (
        engine.prefill(prompt, blocks)
        for prompt, blocks in zip(prompts[:2], block_lists(prompts[:2]), strict=True)
    )
    step = engine.next_step(sequence)
    logits = engine.runner.logits([step])
    swapped = [sequence.tables[0], other.tables[CROSS]]
    step = SequenceStep(step.tokens, step.start, swapped, None, step.num_encoder_tokens)
    assert (engine.runner.logits([step]) - logits).abs().max() > 1e-3


@families
def test_what_is_written_and_where(runner_of, prompts, family):
    engine = HostEngine(runner_of(family))
    sequence = engine.prefill(prompts[1], [5, 9, 3, 7])
    for group, tokens in ((0, 1), (CROSS, len(prompts[1]))):
        for view in engine.views[group]:
            filled = view[[5, 9, 3, 7]].transpose(1, 2).flatten(0, 1).isfinite().all(-1).all(-1)
            assert filled.tolist() == [True] * tokens + [False] * (64 - tokens)
            assert view[[b for b in range(len(view)) if b not in (5, 9, 3, 7)]].isnan().all()
    engine.decode([sequence], 3)
    assert sum(engine.views[0][0][5].isfinite().all(-1).all(0)) == 4
    assert engine.views[CROSS][0][9].isfinite().all()


def test_the_first_token_is_drawn_for_its_position_in_the_decoder(runner_of, prompts):
    engine = HostEngine(runner_of("bart"))
    engine.runner.bind(engine.views)
    tables = engine.tables([1, 2, 3])
    logits = engine.runner.logits([SequenceStep(prompts[0], 0, tables)])[0]
    from kvxfer.model.sampling import sample

    for seed in range(4):
        spec = SampleSpec(temperature=2.0, seed=seed)
        token = engine.runner.prefill_chunk(SequenceStep(prompts[0], 0, tables, spec))
        assert token == sample(logits, 1, spec)


def test_steps_that_cannot_run_are_refused_before_anything_is_written(runner_of):
    engine = HostEngine(runner_of("bart"))
    runner = engine.runner
    runner.bind(engine.views)
    tables = [BlockTable([1]), BlockTable([2])]
    refused = {
        "takes its prompt whole: none begins at 16": lambda: runner.prefill_chunk(
            SequenceStep([1] * 8, 16, tables)
        ),
        "tokens that the encoder had before": lambda: runner.prefill_chunk(
            SequenceStep([1] * 8, 0, tables, None, 8)
        ),
        "must say how many tokens the encoder had": lambda: runner.decode_step(
            [SequenceStep([1], 1, tables)]
        ),
        "a decode step of 2 tokens from position 1": lambda: runner.logits(
            [SequenceStep([1] * 8, 0, tables), SequenceStep([1, 2], 1, tables, None, 8)]
        ),
        "a decode step of 1 tokens from position 0": lambda: runner.decode_step(
            [SequenceStep([1], 0, tables, None, 8)]
        ),
        "1 blocks of 16 tokens for 17 tokens": lambda: runner.prefill_chunk(
            SequenceStep([1] * 17, 0, tables)
        ),
        "1 block tables for 2 groups": lambda: runner.prefill_chunk(
            SequenceStep([1] * 8, 0, tables[:1])
        ),
        "513 tokens, the model takes 512": lambda: runner.decode_step(
            [SequenceStep([1], 1, tables, None, 513)]
        ),
        "verifies no drafts": lambda: runner.verify([SequenceStep([1], 1, tables, None, 8)]),
    }
    for reason, call in refused.items():
        with pytest.raises(ModelError, match=reason):
            call()
    assert all(view.isnan().all() for group in engine.views for view in group)


@families
def test_warm_up_takes_the_longest_prompt_and_touches_the_null_blocks_only(
    runner_of, family, caplog
):
    engine = HostEngine(runner_of(family))
    engine.runner.bind(engine.views)
    engine.runner.warm_up(16, max_batch=2)
    for group in engine.views:
        for view in group:
            assert view[1:].isnan().all()
            assert not view[0].isnan().any()
    assert not engine.runner.record_decode(4)
    assert "runs one sequence a pass" in caplog.text


def test_kv_that_was_never_written_is_not_answered_from(runner_of, prompts):
    engine = HostEngine(runner_of("bart"))
    sequence = engine.prefill(prompts[0], [1, 2, 3])
    tables = [sequence.tables[0], BlockTable([4, 5])]
    lost = HostSequence(sequence.tokens, tables, sequence.num_prompt)
    with pytest.raises(ModelError, match="logits for position 2 are not finite"):
        engine.decode([lost], 1)
