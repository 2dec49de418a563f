"""The runner against transformers' own generate(), and against itself, bit by bit."""

from __future__ import annotations

import pytest
import torch
from support.comparing import BLOCK_SIZE, NEW_TOKENS, assert_same, block_lists, generate, run
from support.models import (
    FAMILIES,
    HostEngine,
    HostSequence,
    host_views,
    write_model,
)

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError, NotFinite, UnsupportedModel, UsageError
from kvxfer.model import ModelInfo, SampleSpec, inspect_model
from kvxfer.model.runner import ModelRunner, SequenceStep


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3", "deepseek_v3"])
def test_tokens_and_logits_equal_transformers(runner_of, prompts, family):
    runner = runner_of(family)
    engine = HostEngine(runner, block_size=BLOCK_SIZE)
    distinct = set()
    for prompt, blocks in zip(prompts[:2], block_lists(prompts[:2]), strict=True):
        expected = generate(runner.info, prompt, NEW_TOKENS)
        runner.bind(engine.views)
        whole = engine.tables(blocks, step_tokens=len(prompt))
        logits = [runner.logits([SequenceStep(prompt, 0, whole)])]
        sequence = HostSequence([*prompt, expected.answer[0]], whole, len(prompt))
        for token in expected.answer[1:]:
            logits.append(runner.logits([engine.next_step(sequence)]))
            sequence.tokens.append(token)
        torch.testing.assert_close(torch.cat(logits), expected.logits, rtol=1e-4, atol=1e-4)
        again = engine.prefill(prompt, blocks)
        engine.decode([again], NEW_TOKENS - 1)
        assert again.answer == expected.answer
        distinct.update(expected.answer)
    assert len(distinct) > 8, "an answer that repeats one token proves little"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layout_changes_a_bit(runner_of, prompts, family):
    runner = runner_of(family)
    reference = HostEngine(runner)
    expected = run(reference, prompts[:4], batch=4)
    for layout in KVCacheLayout:
        engine = HostEngine(runner, layout)
        assert_same(engine, run(engine, prompts[:4], batch=4), reference, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_batch_changes_a_bit(runner_of, prompts, family):
    runner = runner_of(family)
    alone = HostEngine(runner)
    expected = run(alone, prompts, batch=1)
    for batch in (3, 8):
        engine = HostEngine(runner)
        assert_same(engine, run(engine, prompts, batch=batch), alone, expected)


def test_no_batch_changes_a_bit_of_the_logits(runner_of, prompts):
    """Tokens alone would not show a last layer that depends on the batch."""
    engine = HostEngine(runner_of("llama"))
    steps = [
        engine.next_step(engine.prefill(prompt, blocks))
        for prompt, blocks in zip(prompts, block_lists(prompts), strict=True)
    ]
    together = engine.runner.logits(steps)
    for batch in (1, 2, 3):
        parts = [engine.runner.logits(steps[i : i + batch]) for i in range(0, 8, batch)]
        assert torch.equal(torch.cat(parts), together)


def test_sampled_tokens_do_not_depend_on_the_batch(runner_of, prompts):
    sample = SampleSpec(temperature=0.8, top_p=0.9, seed=5)
    alone = HostEngine(runner_of("llama"))
    expected = run(alone, prompts[:4], sample=sample, batch=1)
    engine = HostEngine(runner_of("llama"))
    assert_same(engine, run(engine, prompts[:4], sample=sample, batch=4), alone, expected)
    other = run(engine, prompts[:4], batch=4, sample=SampleSpec(temperature=0.8, top_p=0.9, seed=6))
    assert [s.tokens for s in other] != [s.tokens for s in expected]


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_equal_chunks_give_equal_bits_and_other_chunks_equal_tokens(runner_of, prompts, chunk):
    """Tails of 1 to 3 tokens among them: chunks of 7 leave 2 of 23, and 33 leaves 7 of 40."""
    runner = runner_of("llama")
    first, second, whole = (HostEngine(runner) for _ in range(3))
    chunked = run(first, prompts, chunk, batch=8)
    again = run(second, prompts, chunk, batch=4)
    assert_same(first, chunked, second, again)
    assert [s.tokens for s in run(whole, prompts, 512, batch=8)] == [s.tokens for s in chunked]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_here_and_decode_there_is_the_single_process_bit_by_bit(runner_of, prompts, family):
    single = HostEngine(runner_of(family))
    expected = run(single, prompts, batch=4)
    prefill = HostEngine(runner_of(family, 0), KVCacheLayout.BLHNC)
    decode = HostEngine(runner_of(family, 1), KVCacheLayout.LHBNC, num_blocks=90)
    moved = []
    for prompt, blocks in zip(prompts, block_lists(prompts), strict=True):
        sequence = prefill.prefill(prompt, blocks)
        moved.append(decode.receive(prefill, sequence, [block + 25 for block in blocks]))
    decode.decode(moved, NEW_TOKENS)
    assert_same(decode, moved, single, expected)


def test_only_the_blocks_of_the_step_and_the_null_block_are_written(runner_of, prompts):
    engine = HostEngine(runner_of("llama"))
    sequence = engine.prefill(prompts[0], [5, 9, 3, 7])
    engine.decode([sequence], NEW_TOKENS)
    written = {
        block
        for view in engine.views[0]
        for block in range(len(view))
        if not view[block].isnan().all()
    }
    assert written == {0, 5, 9, 3}
    assert len(sequence.tokens) - 1 == 47, "the fourth block is not reached"


@pytest.mark.parametrize("max_tokens", [3, 64, 5000])
def test_warm_up_touches_the_null_block_only(runner_of, max_tokens):
    engine = HostEngine(runner_of("llama"))
    engine.runner.bind(engine.views)
    engine.runner.warm_up(max_tokens, max_batch=8)
    for view in engine.views[0]:
        assert view[1:].isnan().all()
        assert not view[0].isnan().any()


def test_geometry_comes_from_a_probe(runner_of):
    (spec,) = runner_of("qwen3").probe_specs(32)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim_k, spec.head_dim_v) == (4, 2, 16, 16)
    assert (spec.dtype, spec.block_size, spec.kind) == ("float32", 32, GroupKind.FULL)
    (latent,) = runner_of("deepseek_v3").probe_specs(16)
    assert (latent.num_kv_heads, latent.kind) == (1, GroupKind.MLA)
    assert latent.head_dim_k != latent.head_dim_v


def test_attention_that_is_not_understood_is_refused(tmp_path):
    """gpt-oss has sinks, and MPT computes attention by itself."""
    import transformers

    sinks = transformers.GptOssConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=512,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    transformers.GptOssForCausalLM(sinks).save_pretrained(tmp_path / "sinks")
    runner = ModelRunner.load(inspect_model(tmp_path / "sinks"), "cpu", "float32", 1)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        runner.probe_specs(16)

    own = transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=260)
    transformers.MptForCausalLM(own).save_pretrained(tmp_path / "own")
    info = ModelInfo(tmp_path / "own", "mpt", "MptForCausalLM", 128, 260, (), "")
    runner = ModelRunner.load(info, "cpu", "float32", 1)
    with pytest.raises(UnsupportedModel, match="attention through transformers' seam"):
        runner.probe_specs(16)


def test_steps_that_cannot_run_are_refused_before_anything_is_written(runner_of):
    engine = HostEngine(runner_of("llama"))
    runner = engine.runner
    runner.bind(engine.views)
    one = [BlockTable([1])]
    with pytest.raises(ModelError, match="2 block tables for 1 groups"):
        runner.decode_step([SequenceStep([1], 0, one * 2)])
    with pytest.raises(ModelError, match="9 encoder tokens, the model has no encoder"):
        runner.decode_step([SequenceStep([1], 0, one, num_encoder_tokens=9)])
    with pytest.raises(UsageError, match=r"tokens: 260"):
        runner.prefill_chunk(SequenceStep([1, 260], 0, one))
    with pytest.raises(UsageError, match=r"tokens: -1"):
        runner.decode_step([SequenceStep([-1], 0, one)])
    with pytest.raises(ModelError, match="1 blocks of 16 tokens for 17 tokens"):
        runner.prefill_chunk(SequenceStep([1] * 17, 0, one))
    with pytest.raises(ModelError, match="513 tokens, the model takes 512"):
        runner.prefill_chunk(SequenceStep([1], 512, [BlockTable([1] * 40)]))
    with pytest.raises(ModelError, match="0 tokens from position 3"):
        SequenceStep([], 3, one)
    assert all(view.isnan().all() for view in engine.views[0])


def test_kv_that_was_never_written_is_not_answered_from(runner_of):
    """The blocks hold NaN: a step that reads them ends in an error, not in a token."""
    engine = HostEngine(runner_of("llama"))
    engine.runner.bind(engine.views)
    with pytest.raises(ModelError, match="logits for position 21 are not finite"):
        engine.runner.decode_step([SequenceStep([1], 20, [BlockTable([1, 2])])])


@pytest.mark.parametrize("sample", [SampleSpec(), SampleSpec(temperature=0.8, seed=3)])
def test_kv_that_is_not_finite_costs_its_own_sequence_its_token_and_no_other(
    runner_of, prompts, sample
):
    engine = HostEngine(runner_of("llama"))
    lists = block_lists(prompts[:3])
    sequences = [engine.prefill(*pair) for pair in zip(prompts[:3], lists, strict=True)]
    steps = [engine.next_step(one, sample) for one in sequences]
    whole = engine.runner.decode_step(steps)
    engine.views[0][1][lists[1][0]] = torch.nan
    with pytest.raises(NotFinite) as raised:
        engine.runner.decode_step(steps)
    assert raised.value.tokens == [whole[0], None, whole[2]]
    told = f"the logits for position {steps[1].end} are not finite"
    assert raised.value.problems == {1: told}
    assert told in str(raised.value)


def test_a_closed_or_unbound_runner_says_so(tmp_path):
    info = inspect_model(write_model(tmp_path))
    with pytest.raises(UsageError, match="threads"):
        ModelRunner.load(info, "cpu", None, 0)
    runner = ModelRunner.load(info, "cpu", None, 1)
    with pytest.raises(ModelError, match="no cache was bound"):
        runner.decode_step([SequenceStep([1], 0, [BlockTable([1])])])
    with pytest.raises(ModelError, match="groups were not probed"):
        runner.bind([])
    (spec,) = runner.probe_specs(16)
    views, _ = host_views(spec, KVCacheLayout.LBHNC, 4)
    for wrong, reason in (
        ([], "0 groups, the model has 1"),
        ([views[:3]], "3 views for 4 layers"),
        ([[views[0], views[1][1:], *views[2:]]], "view of layer 1"),
        ([[view.half() for view in views]], "float16"),
    ):
        with pytest.raises(ModelError, match=reason):
            runner.bind(wrong)
    runner.close()
    runner.close()
    with pytest.raises(ModelError, match="closed"):
        runner.probe_specs(16)


def test_a_lack_of_memory_is_told_and_keeps_nothing_of_the_step(monkeypatch, runner_of):
    """What the failed step had taken is free before it is tried again."""
    import weakref

    from kvxfer.errors import ModelOutOfMemory

    llama = runner_of("llama")
    engine, kept = HostEngine(llama), []

    def lacks(*arguments, **named):
        workspace = torch.zeros(8)
        kept.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(llama, "_run", lacks)
        with pytest.raises(ModelOutOfMemory, match="Tried to allocate 1 GiB") as told:
            engine.prefill([1, 2, 3], range(1, 5))
        error = told.value
        assert error.__context__ is None and error.__cause__ is None
        assert kept[0]() is None, "no collection is needed"
    assert engine.prefill([1, 2, 3], range(1, 5)).answer


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_layer_is_told_of_once_its_kv_is_written(runner_of, prompts, family):
    runner = runner_of(family)
    engine = HostEngine(runner, block_size=BLOCK_SIZE)
    runner.bind(engine.views)
    prompt, (blocks,) = prompts[0], block_lists(prompts[:1])
    tables, seen = engine.tables(blocks, step_tokens=len(prompt)), []

    def look(place):
        view, last = engine.views[place.group][place.index], len(prompt) - 1
        block = tables[place.group].at(last // BLOCK_SIZE)
        seen.append((place.group, place.index, bool(view[block, :, last % BLOCK_SIZE].any())))

    runner.prefill_chunk(SequenceStep(prompt, 0, tables), look)
    groups = range(len(engine.views))
    for group in groups:
        told = [index for where, index, _ in seen if where == group]
        assert told == list(range(len(engine.views[group])))
    assert all(is_written for _, _, is_written in seen)
