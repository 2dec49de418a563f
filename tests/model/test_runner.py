"""The runner against transformers' own generate(), and against itself, bit by bit."""

from __future__ import annotations

import pytest
import torch
from support.models import FAMILIES, GREEDY, HostEngine, host_views, write_model

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import ModelError, UnsupportedModel, UsageError
from kvxfer.model import ModelInfo, SampleSpec, inspect_model
from kvxfer.model.runner import ModelRunner, SequenceStep

NEW_TOKENS = 24
BLOCK_SIZE = 16


def tables(prompts, first=1):
    """Disjoint block tables that hold each prompt and its answer, ids descending."""
    found = []
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS + 1) // BLOCK_SIZE)
        found.append(list(range(first, first + count))[::-1])
        first += count
    return found


def run(engine, prompts, chunk=32, sample=GREEDY, batch=1):
    """Prefill all, then decode in batches of `batch`; the sequences with their answers."""
    sequences = [
        engine.prefill(prompt, table, chunk, sample)
        for prompt, table in zip(prompts, tables(prompts), strict=True)
    ]
    for start in range(0, len(sequences), batch):
        engine.decode(sequences[start : start + batch], NEW_TOKENS, sample)
    return sequences


def assert_same(engine_a, sequences_a, engine_b, sequences_b):
    for a, b in zip(sequences_a, sequences_b, strict=True):
        assert a.tokens == b.tokens
        for layer, (kv_a, kv_b) in enumerate(zip(engine_a.kv(a), engine_b.kv(b), strict=True)):
            assert torch.equal(kv_a, kv_b), f"KV of layer {layer}"


def generate(info, prompt):
    """transformers' own greedy answer, without an end token, and the logits behind it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        info.model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "deepseek_v3"])
def test_tokens_and_logits_equal_transformers(runner_of, prompts, family):
    runner = runner_of(family)
    engine = HostEngine(runner, block_size=BLOCK_SIZE)
    distinct = set()
    for prompt, table in zip(prompts[:2], tables(prompts[:2]), strict=True):
        expected, expected_logits = generate(runner.info, prompt)
        runner.bind(engine.views)
        logits = [runner.logits([SequenceStep(prompt, 0, table)])]
        for i, token in enumerate(expected[:-1]):
            logits.append(runner.logits([SequenceStep([token], len(prompt) + i, table)]))
        torch.testing.assert_close(torch.cat(logits), expected_logits, rtol=1e-4, atol=1e-4)
        sequence = engine.prefill(prompt, table)
        engine.decode([sequence], NEW_TOKENS - 1)
        assert sequence.answer == expected
        distinct.update(expected)
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
    steps = []
    for prompt, table in zip(prompts, tables(prompts), strict=True):
        sequence = engine.prefill(prompt, table)
        steps.append(SequenceStep(sequence.tokens[-1:], len(prompt), table))
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
    for prompt, table in zip(prompts, tables(prompts), strict=True):
        sequence = prefill.prefill(prompt, table)
        there = [block + 25 for block in table]
        for source, destination in zip(prefill.views, decode.views, strict=True):
            destination[there] = source[table]
        sequence.block_table = there
        moved.append(sequence)
    decode.decode(moved, NEW_TOKENS)
    assert_same(decode, moved, single, expected)


def test_only_the_blocks_of_the_step_and_the_null_block_are_written(runner_of, prompts):
    engine = HostEngine(runner_of("llama"))
    sequence = engine.prefill(prompts[0], [5, 9, 3, 7])
    engine.decode([sequence], NEW_TOKENS)
    written = {
        block
        for view in engine.views
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
    for view in engine.views:
        assert view[1:].isnan().all()
        assert not view[0].isnan().any()


def test_geometry_comes_from_a_probe(runner_of):
    spec = runner_of("qwen3").probe_spec(32)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim_k, spec.head_dim_v) == (4, 2, 16, 16)
    assert (spec.dtype, spec.block_size) == ("float32", 32)
    latent = runner_of("deepseek_v3").probe_spec(16)
    assert latent.num_kv_heads == 1
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
        runner.probe_spec(16)

    own = transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=260)
    transformers.MptForCausalLM(own).save_pretrained(tmp_path / "own")
    info = ModelInfo(tmp_path / "own", "mpt", "MptForCausalLM", 128, 260, (), "")
    runner = ModelRunner.load(info, "cpu", "float32", 1)
    with pytest.raises(UnsupportedModel, match="attention through transformers' seam"):
        runner.probe_spec(16)


def test_steps_that_cannot_run_are_refused_before_anything_is_written(runner_of):
    engine = HostEngine(runner_of("llama"))
    runner = engine.runner
    runner.bind(engine.views)
    with pytest.raises(UsageError, match=r"tokens: 260"):
        runner.prefill_chunk(SequenceStep([1, 260], 0, [1]))
    with pytest.raises(UsageError, match=r"tokens: -1"):
        runner.decode_step([SequenceStep([-1], 0, [1])])
    with pytest.raises(ModelError, match="1 blocks of 16 tokens for 17 tokens"):
        runner.prefill_chunk(SequenceStep([1] * 17, 0, [1]))
    with pytest.raises(ModelError, match="513 tokens, the model takes 512"):
        runner.prefill_chunk(SequenceStep([1], 512, [1] * 40))
    with pytest.raises(ModelError, match="0 tokens from position 3"):
        SequenceStep([], 3, [1])
    assert all(view.isnan().all() for view in engine.views)


def test_kv_that_was_never_written_is_not_answered_from(runner_of):
    """The blocks hold NaN: a step that reads them ends in an error, not in a token."""
    engine = HostEngine(runner_of("llama"))
    engine.runner.bind(engine.views)
    with pytest.raises(ModelError, match="logits for position 21 are not finite"):
        engine.runner.decode_step([SequenceStep([1], 20, [1, 2])])


def test_a_closed_or_unbound_runner_says_so(tmp_path):
    info = inspect_model(write_model(tmp_path))
    with pytest.raises(UsageError, match="threads"):
        ModelRunner.load(info, "cpu", None, 0)
    runner = ModelRunner.load(info, "cpu", None, 1)
    with pytest.raises(ModelError, match="no cache was bound"):
        runner.decode_step([SequenceStep([1], 0, [1])])
    views, _ = host_views(runner.probe_spec(16), KVCacheLayout.LBHNC, 4)
    with pytest.raises(ModelError, match="view of layer 1"):
        runner.bind([views[0], views[1][1:]])
    runner.close()
    runner.close()
    with pytest.raises(ModelError, match="closed"):
        runner.probe_spec(16)
