"""What the benches of memory and layouts are made of, against brute force."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bench.buffer_plot import BufferPlotOptions, plot, run_buffer_plot
from kvxfer.bench.journal import Journal
from kvxfer.bench.memory_watch import Baseline, Sample, SampleLog, fit, read_log
from kvxfer.bench.models import model_pair
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure
from kvxfer.bench.scratch import is_out_of_memory
from kvxfer.bench.service_load import (
    LoadShape,
    blocks_per_sequence,
    sample_nucleus,
    spread_tables,
)
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.share_trial import largest_surviving
from kvxfer.bench.stress import StressOptions
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cli import app
from kvxfer.errors import ModelOutOfMemory, OutOfMemory, UsageError
from kvxfer.model.random_weights import write_random_model
from kvxfer.model.sampling import nucleus

SHAPE = LoadShape(sequences=3, draft_tokens=2, prompt_tokens=20, steps=4, pass_tokens=32)
SPECS = (
    KVCacheSpec(2, 2, 8, 8, "float32", 16),
    KVCacheSpec(2, 2, 8, 8, "float32", 16, GroupKind.SLIDING, 8),
)
FIELDS = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@given(
    low=st.integers(0, 50),
    extra=st.integers(0, 200),
    beyond=st.integers(0, 300),
    resolution=st.integers(1, 9),
)
def test_the_largest_that_survives_is_found(low, extra, beyond, resolution) -> None:
    limit, truth = low + extra, low + beyond
    tried: list[int] = []

    def survives(size: int) -> bool:
        tried.append(size)
        return size <= truth

    found = largest_surviving(low, limit, resolution, survives)
    best = min(limit, truth)
    assert best - resolution < found <= best
    assert all(low < size <= limit for size in tried)
    assert max(tried, default=low) <= low + max(4 * resolution, 4 * (best - low + resolution))


@given(seed=st.integers(0, 1000), top_p=st.sampled_from([0.01, 0.3, 0.9, 1.0]))
def test_sampled_tokens_lie_in_the_nucleus(seed: int, top_p: float) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((4, 50), generator=source)
    found = sample_nucleus(logits, 0.7, top_p, source)
    for row, token in zip(logits, found.tolist(), strict=True):
        # A little more than top_p: fp32 and fp64 may differ about the last token of it.
        kept = nucleus(row.numpy().astype(np.float64) / 0.7, min(1.0, top_p + 1e-5))
        assert np.isfinite(kept[token])


def test_sampling_follows_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]])).repeat(4000, 1)
    found = sample_nucleus(logits, 1.0, 1.0, torch.Generator().manual_seed(1))
    shares = torch.bincount(found, minlength=3) / len(found)
    assert torch.allclose(shares, torch.tensor([0.6, 0.3, 0.1]), atol=0.04)


@given(spare=st.integers(0, 40))
def test_tables_are_disjoint_and_reach_the_last_block(spare: int) -> None:
    held = blocks_per_sequence(SPECS, SHAPE)
    committed = [1 + 3 * blocks + spare for blocks in held]
    tables = spread_tables(SPECS, SHAPE, committed)
    for group, blocks in enumerate(committed):
        ids = [block for sequence in tables for block in sequence[group].blocks]
        assert len(set(ids)) == len(ids) == 3 * held[group]
        assert set(ids) <= set(range(1, blocks))
        assert blocks - 1 in ids
    with pytest.raises(UsageError, match="sequences"):
        spread_tables(SPECS, SHAPE, [3 * held[0], committed[1]])


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="draft_tokens"):
        LoadShape(sequences=1, draft_tokens=0, prompt_tokens=1, steps=1, pass_tokens=1)


samples = st.lists(
    st.builds(Sample, st.floats(0, 9), st.integers(0, 500), st.integers(0, 500), st.integers(0, 9)),
    min_size=1,
)


@given(samples)
def test_the_fit_is_the_smallest_that_covers_all(found: list[Sample]) -> None:
    baseline = Baseline(used=200, allocated_peak=100, headroom=50, kv=0)
    result = fit(baseline, found)
    for held, base, growth, fraction in (
        ([s.used for s in found], 200, result.growth, result.fraction),
        ([s.allocated_peak for s in found], 100, result.allocated_growth,
         result.allocated_fraction),
    ):  # fmt: skip
        assert all(one <= base + growth for one in held)
        assert growth == 0 or base + growth in held
        assert fraction == growth / 50


def test_samples_come_back_from_the_file_and_may_be_plotted(tmp_path: Path) -> None:
    path = tmp_path / "buffer.jsonl"
    log = SampleLog(path, Baseline(1 << 20, 1 << 20, 8 << 20, 0))
    for second in range(5):
        log.add(Sample(float(second), (1 + second) << 20, 1 << 20, second))
    again = read_log(path)
    assert (again.baseline, again.samples) == (log.baseline, log.samples)
    picture = tmp_path / "buffer.svg"
    problem = plot(again, picture)
    if "matplotlib" in problem:
        with pytest.raises(UsageError, match="matplotlib"):
            run_buffer_plot(BufferPlotOptions(samples=path, out=picture))
        return
    first = picture.read_bytes()
    assert b"<svg" in first
    assert run_buffer_plot(BufferPlotOptions(samples=path, out=picture)) == 0
    assert picture.read_bytes() == first, "the same samples give the same picture"


def test_samples_that_are_none_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl"):
        run_buffer_plot(BufferPlotOptions(samples=bad, out=tmp_path / "x.svg"))


def test_figures_are_kept_from_the_first_on_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    record = Record(path, "kvxfer bench x")
    record.machine = "one"
    record.add(Figure("a", 1.0, "u", 2.0, "higher", 1, 0.0))
    assert [entry["metric"] for entry in json.loads(path.read_text())] == ["a"]
    assert record.exit_code == 1
    record.add(Figure("b", 1.0, "u", None, "higher", 1, 0.0))
    record.add(Figure("a", 3.0, "u", 2.0, "higher", 1, 0.0))
    kept = json.loads(path.read_text())
    assert [(entry["metric"], entry["value"]) for entry in kept] == [("a", 3.0), ("b", 1.0)]
    assert record.exit_code == 0
    assert kept[0]["machine"] == "one"


def test_a_journal_goes_on_with_its_own_command(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    Journal(figures, "one").keep("piece", {"value": 3})
    assert Journal(figures, "one").get("piece") == {"value": 3}
    assert Journal(figures, "another").get("piece") is None
    Journal(figures, "one").close()
    assert Journal(figures, "one").get("piece") is None
    Journal(None, "one").keep("piece", 1)


def test_a_command_line_names_what_is_not_the_default() -> None:
    options = StressOptions(sequences=4, device="cpu", json=Path("x.json"))
    assert command_line("stress", options) == "kvxfer bench stress --device cpu --sequences 4"


def test_a_command_line_can_be_typed_again() -> None:
    options = ServingOptions(
        model="a b", verify=True, ignore_eos=False, worker_args="--block-size 8"
    )
    words = shlex.split(command_line("serving", options))
    assert words[:3] == ["kvxfer", "bench", "serving"]
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert bound.arguments["options"] == options


def test_what_says_that_memory_did_not_suffice() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(OutOfMemory("cuMemCreate", 2, 1, 0))
    assert is_out_of_memory(ModelOutOfMemory("x"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("illegal memory access"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_random_models_are_what_their_fields_say(tmp_path: Path) -> None:
    from kvxfer.model.loader import inspect_model, load_model

    first = write_random_model(tmp_path / "a", FIELDS, seed=3)
    info = inspect_model(first)
    assert (info.vocab_size, info.max_model_len) == (300, 64)
    assert (
        info.fingerprint == inspect_model(write_random_model(tmp_path / "b", FIELDS, 3)).fingerprint
    )
    assert (
        info.fingerprint != inspect_model(write_random_model(tmp_path / "c", FIELDS, 4)).fingerprint
    )
    for name, weight in load_model(info, "cpu", None).named_parameters():
        if weight.ndim == 1:
            assert bool((weight == 1).all()), name
        else:
            assert 2**-6 <= float(weight.abs().min()) <= float(weight.abs().max()) < 2**-5, name
            assert abs(float(weight.mean())) < 2e-3, name


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "a", FIELDS)
    with pytest.raises(UsageError, match="draft"), model_pair(None, model, "cpu"):
        pass
