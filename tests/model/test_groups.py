"""Models whose cache has groups with windows: rings, several groups, and what no longer matters."""

from __future__ import annotations

import pytest
import torch
from support.comparing import BLOCK_SIZE, NEW_TOKENS, assert_same, block_lists, generate, run
from support.models import MISTRAL_WINDOW, HostEngine, HostSequence

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError
from kvxfer.model.groups import LayerKV, ModelGroups, Place
from kvxfer.model.runner import SequenceStep

SLIDING, FULL = GroupKind.SLIDING, GroupKind.FULL
WINDOWED = ("mistral", "gemma2", "gemma3")


def test_layers_that_keep_the_same_share_a_group():
    near, far = LayerKV(2, 8, 8, "float32", SLIDING, 12), LayerKV(2, 8, 8, "float32")
    wide, cross = LayerKV(2, 16, 16, "float32"), LayerKV(2, 8, 8, "float32", GroupKind.CROSS)
    groups = ModelGroups.of([near, far, near, wide, far], [cross, cross], 16)
    assert [(s.kind, s.window, s.num_layers) for s in groups.specs] == [
        (SLIDING, 12, 2),
        (FULL, 0, 2),
        (FULL, 0, 1),
        (GroupKind.CROSS, 0, 2),
    ]
    assert groups.layers == (Place(0, 0), Place(1, 0), Place(0, 1), Place(2, 0), Place(1, 1))
    assert groups.cross_layers == (Place(3, 0), Place(3, 1))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mistral", [(SLIDING, MISTRAL_WINDOW, 4)]),
        ("gemma2", [(SLIDING, MISTRAL_WINDOW, 2), (FULL, 0, 2)]),
        ("gemma3", [(SLIDING, MISTRAL_WINDOW, 3), (FULL, 0, 1)]),
    ],
)
def test_the_probe_finds_windows_by_layer(runner_of, family, expected):
    specs = runner_of(family).probe_specs(BLOCK_SIZE)
    assert [(spec.kind, spec.window, spec.num_layers) for spec in specs] == expected


@pytest.mark.parametrize("chunk", [5, 16, 100])
@pytest.mark.parametrize("family", WINDOWED)
def test_rings_answer_as_transformers_does(runner_of, prompts, family, chunk):
    """90 tokens and 24 more: the window passes several times over the ring's blocks."""
    runner = runner_of(family)
    engine = HostEngine(runner)
    prompt, (blocks,) = prompts[4], block_lists(prompts[4:5])
    sequence = engine.prefill(prompt, blocks, chunk)
    if chunk < 100:
        assert len(sequence.tables[0].blocks) < len(blocks) - 1, "it wraps around"
    engine.decode([sequence], NEW_TOKENS - 1)
    expected = generate(runner.info, prompt, NEW_TOKENS)
    assert sequence.answer == expected.answer
    last = runner.logits([engine.next_step(HostSequence(sequence.tokens[:-1], *rest(sequence)))])
    torch.testing.assert_close(last[0], expected.logits[-1], rtol=1e-4, atol=1e-4)


def rest(sequence):
    return sequence.tables, sequence.num_prompt


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_layout_for_each_group_changes_no_bit(runner_of, prompts, family):
    runner = runner_of(family)
    single = HostEngine(runner)
    expected = run(single, prompts[:3], batch=3)
    for pair in ((KVCacheLayout.BHLNC, KVCacheLayout.LHBNC), (KVCacheLayout.LBNHC, "BLNHC")):
        engine = HostEngine(runner, [KVCacheLayout(one) for one in pair])
        assert_same(engine, run(engine, prompts[:3], batch=1), single, expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_only_what_is_still_seen_is_handed_over(runner_of, prompts, family):
    """The decode side has shorter rings, and receives nothing of what its window has left."""
    single = HostEngine(runner_of(family))
    expected = run(single, prompts[:5], batch=5)
    prefill = HostEngine(runner_of(family), [KVCacheLayout.BLHNC, KVCacheLayout.LBHNC])
    decode = HostEngine(runner_of(family, 1), [KVCacheLayout.LHBNC, KVCacheLayout.BLNHC])
    moved = [
        decode.receive(prefill, prefill.prefill(prompt, blocks), [id + 9 for id in blocks])
        for prompt, blocks in zip(prompts[:5], block_lists(prompts[:5]), strict=True)
    ]
    decode.decode(moved, NEW_TOKENS)
    assert_same(decode, moved, single, expected)


@pytest.mark.parametrize("family", WINDOWED)
def test_what_no_token_sees_is_not_read(runner_of, prompts, family):
    """Before every step whatever lies outside the window is overwritten with NaN: blocks that the
    ring will take over, and the first tokens of the block that the window begins in."""
    runner = runner_of(family)
    untouched, engine = HostEngine(runner), HostEngine(runner)
    prompt, (blocks,) = prompts[4], block_lists(prompts[4:5])
    expected = untouched.prefill(prompt, blocks, 8)
    untouched.decode([expected], NEW_TOKENS)

    tables, token = engine.tables(blocks, 8), None
    runner.bind(engine.views)
    for start in range(0, len(prompt), 8):
        forget(engine, tables, start)
        part = prompt[start : start + 8]
        token = runner.logits([SequenceStep(part, start, tables)])[0].argmax().item()
    found = HostSequence([*prompt, token], tables, len(prompt))
    for _ in range(NEW_TOKENS):
        forget(engine, tables, len(found.tokens) - 1)
        engine.decode([found], 1)
    assert_same(engine, [found], untouched, [expected])


def forget(engine, tables, start):
    """NaN for all that a query at `start` does not see, in the groups with a window."""
    for spec, views, table in zip(engine.specs, engine.views, tables, strict=True):
        if not spec.window:
            continue
        first = spec.first_seen(start)
        entries = range(first // spec.block_size, spec.num_blocks(start))
        kept = table.ids(entries)
        for view in views:
            view[[b for b in table.blocks if b not in kept]] = float("nan")
            if kept:
                view[kept[0], :, : first % spec.block_size] = float("nan")


def test_a_ring_too_short_for_the_chunk_is_refused(runner_of, prompts):
    engine = HostEngine(runner_of("mistral"))
    engine.runner.bind(engine.views)
    with pytest.raises(ModelError, match="2 blocks of 16 tokens for 40 tokens"):
        engine.runner.prefill_chunk(SequenceStep(prompts[1], 0, [BlockTable([1, 2])]))
    assert all(view.isnan().all() for view in engine.views[0])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_verifying_a_draft_gives_every_row_that_decoding_would(runner_of, prompts, family):
    runner = runner_of(family)
    plain, engine = HostEngine(runner), HostEngine(runner)
    expected = [
        plain.prefill(p, b) for p, b in zip(prompts, block_lists(prompts[:2]), strict=False)
    ]
    plain.decode(expected, 5)
    runner.bind(plain.views)
    following = runner.logits([plain.next_step(one) for one in expected])

    steps = []
    for one, blocks in zip(expected, block_lists(prompts[:2]), strict=True):
        engine.prefill(one.tokens[: one.num_prompt], blocks)
        steps.append(
            SequenceStep(one.tokens[one.num_prompt :], one.num_prompt, engine.tables(blocks))
        )
    steps[1] = SequenceStep(steps[1].tokens[:3], steps[1].start, steps[1].tables)
    found = runner.verify(steps)
    assert [logits.shape for logits in found] == [(6, 260), (3, 260)]
    assert found[0].argmax(-1).tolist()[:5] == expected[0].answer[1:]
    assert found[1].argmax(-1).tolist() == expected[1].answer[1:4]
    torch.testing.assert_close(found[0][-1], following[0], rtol=1e-4, atol=1e-4)
    # Its KV is there: decoding goes on from it.
    again = HostSequence(list(expected[0].tokens), steps[0].tables, expected[0].num_prompt)
    engine.decode([again], 4)
    plain.decode(expected[:1], 4)
    assert again.tokens == expected[0].tokens
    assert runner.verify([]) == []
