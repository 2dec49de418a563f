"""The benches of memory and layouts at toy size on the host: every step of theirs but a lack of
memory, which a host does not report. In this process, since what costs time is to import torch;
`test_isolated` has the processes in which some of them measure."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvxfer.bench.journal import Journal
from kvxfer.bench.record import command_line
from kvxfer.bench.service_engine import service_setup
from kvxfer.bench.share import ShareOptions
from kvxfer.bench.share_trial import measure_share
from kvxfer.bench.stress import Outcome, StressOptions, run_stress, serve_once
from kvxfer.cli import app
from kvxfer.command import run_app
from kvxfer.errors import KvxferError


def toy() -> dict[str, Any]:
    """A small load, in 1 GiB beside what this process holds already (imports to come among it)."""
    return {
        "device": "cpu",
        "sequences": 3,
        "draft_tokens": 2,
        "prompt_tokens": 40,
        "steps": 2,
        "max_num_batched_tokens": 64,
        "memory_budget_bytes": psutil.Process().memory_info().rss + (1 << 30),
    }


RECORD = {
    "metric", "value", "unit", "bar", "better", "ok", "runs", "spread_iqr", "machine", "versions",
    "commit", "command",
}  # fmt: skip


def figures(path: Path) -> dict[str, Any]:
    """The kept figures by metric."""
    kept = json.loads(path.read_text())
    assert all(set(figure) == RECORD for figure in kept)
    assert all(figure["machine"] for figure in kept)
    return {figure["metric"]: figure["value"] for figure in kept}


def test_layouts_give_the_same_tokens(tmp_path: Path) -> None:
    kept = tmp_path / "layouts.json"
    command = ["bench", "layouts", "--device", "cpu", "--contexts", "32", "--contexts", "100"]
    command += ["--batch", "2", "--rounds", "3", "--warm-up-rounds", "1", "--json", str(kept)]
    assert run_app(app, command) == 0
    found = figures(kept)
    assert found["layouts_tokens_equal_32"] == found["layouts_tokens_equal_100"] == 1
    assert found["layouts_logits_equal_100"] == 1, "on the host every bit is the same"
    ratios = [value for metric, value in found.items() if "ratio_to_best" in metric]
    assert len(ratios) == 12
    assert ratios.count(1.0) >= 2, "the best is 1 at each length"


def test_both_ways_serve_the_same_tokens(capsys) -> None:
    with service_setup(StressOptions(**toy())) as setup:
        growable = serve_once(setup, None)
        fixed = serve_once(setup, 0.92)
    account = capsys.readouterr().out
    assert "- draft model" in account
    assert "- speculative steps" in account, "the hooks are rows of the account"
    for outcome in (growable, fixed):
        assert outcome.survives, outcome
        assert outcome.kv_tokens > 3 * 40
        # A model that drafts for itself agrees with itself: 3 sequences, 2 steps, 2 drafts each.
        assert outcome.detail == "21 tokens generated, 12 drafts accepted"
    assert growable.digest == fixed.digest


def test_stress_lowers_what_does_not_survive_and_goes_on_where_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "stress.json"
    options = StressOptions(**toy(), json=kept)
    journal = Journal(kept, command_line("stress", options))
    for piece, survives, tokens in (
        ("growable", True, 900),
        ("fixed at 0.92", False, 1000),
        ("fixed at 0.88", False, 800),
        ("fixed at 0.84", True, 600),
    ):
        outcome = Outcome(survives, tokens, "", "d" if survives else "", "a machine")
        fields = ("survives", "kv_tokens", "detail", "digest", "machine")
        journal.keep(piece, {name: getattr(outcome, name) for name in fields})
    assert run_stress(options) == 0
    assert figures(kept) == {
        "stress_growable_survives": 1,
        "stress_growable_kv_tokens": 900,
        "stress_fixed_092_survives": 0,
        "stress_fixed_lowered_utilization": 0.84,
        "stress_fixed_kv_tokens": 600,
        "stress_tokens_ratio": 1.5,
        "stress_outputs_equal": 1,
    }
    assert not list(tmp_path.glob("*.journal")), "it is complete"


@pytest.mark.slow
def test_share_finds_the_largest(tmp_path: Path) -> None:
    kept = tmp_path / "share.json"
    options = ShareOptions(**toy(), resolution_mib=16, most_gib=0.0625, json=kept)
    with service_setup(options) as setup:
        assert pickle.loads(pickle.dumps(setup)) == setup, "it crosses to another process"
        code = measure_share(options, setup)
    found = figures(kept)
    assert found["share_measured_size_survives"] == found["share_outputs_equal"] == 1
    measured, largest = found["share_measured_kv"], found["share_largest_surviving_kv"]
    share = found["share_of_largest_surviving_kv"]
    assert share == pytest.approx(measured / largest)
    assert largest == pytest.approx(measured + 0.0625, abs=0.001), "a host has room for all of it"
    assert code == (0 if share >= 0.97 else 1)


@pytest.mark.slow
def test_buffer_logs_fits_and_confirms(tmp_path: Path, capsys) -> None:
    kept = tmp_path / "buffer.json"
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in toy().items())
    flags = [word for pair in pairs for word in pair]
    command = ["bench", "buffer", *flags, "--minutes", "0.02", "--confirm-s", "0.3"]
    assert run_app(app, [*command, "--json", str(kept)]) in (0, 1)
    found = figures(kept)
    assert found["buffer_operations"] > 3
    assert found["buffer_fitted_fraction_confirmed"] == 1
    assert found["buffer_least_fraction_confirmed"] <= found["buffer_fitted_fraction"]
    lines = (tmp_path / "buffer.jsonl").read_text().splitlines()
    assert len(lines) >= 3, "the baseline, and a sample a second"
    picture, printed = tmp_path / "buffer.svg", capsys.readouterr().out
    assert picture.exists() or "matplotlib is missing" in printed


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("layouts", "--batch", "0"),
        ("layouts", "--contexts", "2"),
        ("layouts", "--device", "tpu"),
        ("stress", "--sequences", "0"),
        ("stress", "--utilization", "1.5"),
        ("share", "--resolution-mib", "0"),
        ("share", "--prompt-tokens", "5000"),
        ("share", "--max-num-batched-tokens", "17"),
        ("buffer", "--minutes", "0"),
    ],
)
def test_bad_options_are_refused(command: str, option: str, value: str, capsys) -> None:
    try:
        code = run_app(app, ["bench", command, option, value])
    except KvxferError:
        pytest.fail("a command reports its own errors")
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1
    assert option.removeprefix("--").replace("-", "_") in lines[0]
    assert value in lines[0]
