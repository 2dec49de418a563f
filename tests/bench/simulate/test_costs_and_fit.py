"""Files of costs, what is fitted to observations, the choice of a pair, and the loads."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bench.results import read_results
from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt, TraceLine, make_round, make_shapes
from kvxfer.bench.simulate import fit
from kvxfer.bench.simulate.costs import NAMES, assume, read_costs, write_costs
from kvxfer.bench.simulate.options import GPU_COSTS, CalibrateOptions, SimulateOptions
from kvxfer.bench.simulate.pairing import choose
from kvxfer.bench.simulate.placing import measure_placing
from kvxfer.bench.simulate.real import Event, Observed
from kvxfer.bench.simulate.run import run_simulate
from kvxfer.bench.simulate.sweep import splits_of
from kvxfer.bench.simulate.validate import compare
from kvxfer.errors import UsageError
from kvxfer.serve.pairing import (
    MOST_OF_A_SIDE,
    DecodeSide,
    PrefillSide,
    choose_pair,
    nearly,
    pair_cost,
)

SMALL = SimulateOptions(
    prefill=2, decode=2, num_prompts=30, random_input_len=200, random_output_len=8, request_rate=50
)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs = read_costs(GPU_COSTS)
    write_costs(tmp_path / "costs.json", costs)
    again = read_costs(tmp_path / "costs.json")
    assert all(getattr(again, name) == getattr(costs, name) for name in NAMES)
    assert again.what == costs.what


def test_each_shipped_cost_says_where_it_comes_from() -> None:
    costs = read_costs(GPU_COSTS)
    for name, source in costs.sources.items():
        assert source.startswith(("measured", "computed", "assumed", "timed")), name
        for word in source.replace(",", " ").replace(":", " ").replace(";", " ").split():
            if word.endswith(".json"):
                results = Path(__file__).parents[1] / "results" / word
                assert read_results(results), f"{name}: {word}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file["costs"].pop("decode_step_s"), "lacks decode_step_s"),
        (lambda file: file["costs"].update(speed={"value": 1, "source": ""}), "'speed'"),
        (lambda file: file["costs"]["lane_s"].update(value=-1), "lane_s"),
        (lambda file: file["costs"]["lane_bytes_per_s"].update(value=0), "lane_bytes_per_s"),
        (lambda file: file["costs"]["lane_s"].pop("source"), "source"),
        (lambda file: file.update(more=1), "more"),
    ],
)
def test_a_file_of_costs_that_is_wrong_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    file = json.loads(GPU_COSTS.read_text())
    change(file)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(file))
    with pytest.raises(UsageError, match=told):
        read_costs(path)


@pytest.mark.parametrize("text", ["lane_s", "lane_s=", "lane_s=fast", "speed=1", "lane_s=-1", "=1"])
def test_what_is_assumed_has_to_be_a_cost(text: str) -> None:
    with pytest.raises(UsageError):
        assume(read_costs(GPU_COSTS), [text])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"decode": 10**6}, "decode"),
        ({"cores": -1}, "cores"),
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes"),
        ({"block_size": 0}, "block_size"),
        ({"fabric_gbps": float("nan")}, "fabric_bytes_per_s"),
        ({"peer_timeout_s": 0.0}, "peer_timeout_s"),
        ({"kv_low_watermark": 1.0}, "low_watermark"),
        ({"steps": 0}, "steps"),
        ({"find_ratio": True, "prefill": 1, "decode": 1}, "find_ratio"),
        ({"plot": Path("x.svg")}, "plot"),
        ({"plot": Path("x.txt"), "find_ratio": True}, "plot"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"request_rate": -1.0}, "request_rate"),
        ({"trace": Path("/nowhere"), "request_rate": float("inf")}, "trace"),
        ({"costs": Path("/nowhere")}, "costs"),
        ({"goodput": ("ttft",)}, "goodput"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refused:
        run_simulate(replace(SMALL, **changes))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"repeats": 0}, "repeats"), ({"seconds": 0.0}, "seconds"), ({"model": Path("/x")}, "model")],
)
def test_options_of_a_calibration_are_checked(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refused:
        CalibrateOptions(**changes).check()
    assert refused.value.field == field


@pytest.mark.slow
def test_a_run_keeps_its_figures_and_a_sweep_its_picture(tmp_path: Path, capsys: Any) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in files:
        assert run_simulate(replace(SMALL, json=path)) == 0
    one, two = (
        [(row.metric, row.value) for row in read_results(path)] for path in files
    )  # fmt: skip
    assert one == two
    assert ("simulated, 2 : 2: requests that came whole", 30) in one
    sweep = replace(
        SMALL, find_ratio=True, steps=3, plot=tmp_path / "ratio.svg", goodput=("ttft:1000",)
    )
    assert run_simulate(sweep) == 0
    assert (tmp_path / "ratio.svg").read_text().startswith("<?xml")
    told = capsys.readouterr().out
    assert "best: " in told and "2 : 2" in told


def test_workers_are_divided_from_end_to_end() -> None:
    assert splits_of(10, 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert splits_of(1000, 3) == [1, 500, 999]
    assert splits_of(3, 9) == [1, 2]
    assert splits_of(9, 1) == [4]


TRACE = [TraceLine(5.0, 700, 20), TraceLine(5.0, 1, 1), TraceLine(90.0, 30, 8, [1])]


@pytest.mark.parametrize("trace", [[], TRACE])
def test_the_load_is_that_of_bench_serving(trace: list[TraceLine]) -> None:
    options = ServingOptions(
        base_url="http://x", num_prompts=20, random_input_len=40, random_prefix_len=6,
        random_range_ratio=0.5, seed=3, request_rate=float("inf") if trace else 7.0,
    )  # fmt: skip
    prompts, shapes = make_round(options, trace, 100, 1), make_shapes(options, trace, 100, 1)
    told = [(one.at_s, one.num_input, one.num_output) for one in shapes]
    assert told == [(one.at_s, len(one.tokens), one.num_output) for one in prompts]


SECONDS = st.lists(st.sampled_from([0.001, 0.0105, 0.011, 0.5, 0.52, 3.0]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SECONDS, SECONDS, st.sampled_from([0.0, 0.02]), st.integers(0, 5))
def test_the_pair_is_one_that_the_router_may_choose(
    prefill_s: list[float], decode_s: list[float], moves_s: float, seed: int
) -> None:
    prefills = [PrefillSide(0, 1, 1 / one, False) for one in prefill_s]
    decodes = [DecodeSide(one, 0, 1, 1.0, int(moves_s * 1e9), False) for one in decode_s]
    pairs = [(p, d) for p in range(len(prefills)) for d in range(len(decodes))]
    costs = {at: pair_cost(prefills[at[0]], decodes[at[1]], 1e9) for at in pairs}
    best = min(costs.values())
    found = choose(np.array(prefill_s), np.array(decode_s), moves_s, np.random.default_rng(seed))
    assert costs[found.prefill, found.decode] <= nearly(best) + 1e-9
    near = [at for at, cost in costs.items() if cost <= nearly(best)]
    seen = min(len(near), MOST_OF_A_SIDE**2)
    assert abs(found.num_seen - seen) <= 1  # a pair right at the bound, rounded
    real = choose_pair(prefills, decodes, lambda *_: 1e9, random.Random(seed))
    assert costs[real] <= nearly(best) + 1e-9


def test_a_sum_of_costs_is_found_again_and_none_is_negative() -> None:
    chance = np.random.default_rng(0)
    rows = chance.uniform(1, 100, (40, 3))
    totals = rows @ np.array([2e-3, 0.0, 5e-4])
    assert fit.fit_sum(rows.tolist(), totals.tolist()) == pytest.approx([2e-3, 0, 5e-4], abs=1e-9)
    falling = [(1.0, float(at)) for at in range(1, 9)]
    found = fit.fit_sum(falling, [9.0 - at for at in range(1, 9)])
    assert min(found) >= 0


def observed() -> Observed:
    """Requests one by one, whose times are known sums."""
    answers, events = [], {}
    for at, size in enumerate((100, 200, 300, 600, 900)):
        sent_s, name = 10.0 * at, str(at)
        accepted = sent_s + 2e-3
        requested = accepted + 5e-4
        behind = sum(start * min(256, size - start) for start in range(0, size, 256))
        took_s = 3e-3 * -(-size // 256) + 2e-4 * size + 1e-7 * behind
        computed = requested + took_s
        last = (size - 1) % 256 + 1
        filled = computed + 1e-3 + 1e-3 + last * 4096 / 1e9
        times = {"accepted": accepted, "requested": requested, "computed": computed}
        events[name] = [
            Event(round(1e9 * when), what, name)
            for what, when in [*times.items(), ("filled", filled)]
        ]
        moved_ns = round(size * 4096)
        events[name].append(Event(0, "transfer_end", name, 1000, 1000 + moved_ns, size * 4096))
        first = computed + 2e-3
        step_s = 7e-3 + 5e-4 + 1e-6 * (size + 6)
        answer = Answer(size, 12, sent_s, sent_s, request_id=name, num_output=12)
        answer.token_s = [first + step_s * step for step in range(12)]
        answers.append(answer)
    prompts = [Prompt(0.0, [0] * one.num_input, 12) for one in answers]
    return Observed("alone", prompts, 0.0, 50.0, answers, 0.06, 0.03, events)


def test_known_costs_are_found_in_observed_times() -> None:
    alone = observed()
    prefill = fit.fit_prefill(alone, 256)
    assert prefill["prefill_chunk_s"] == pytest.approx(3e-3, rel=1e-3)
    assert prefill["prefill_token_s"] == pytest.approx(2e-4, rel=1e-3)
    assert prefill["prefill_context_s"] == pytest.approx(1e-7, rel=1e-2)
    lane = fit.fit_lane(alone, 256, 5e-4)
    assert lane["kv_token_bytes"] == 4096
    assert lane["lane_bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
    assert lane["lane_s"] == pytest.approx(1e-3, rel=1e-2)
    told = dict.fromkeys(
        ("front_delivery_s", "front_token_s", "client_delivery_s", "client_token_s"), 1e-4
    )
    ways = fit.fit_ways(alone, told | {"client_request_s": 3e-4})
    assert ways["prefill_control_s"] == pytest.approx(1e-3, rel=1e-3)
    assert ways["front_request_s"] == pytest.approx(2e-3 - 3e-4 - 5e-4, rel=1e-2)
    assert ways["first_token_s"] == pytest.approx(2e-3 - 4e-4, rel=1e-2)
    decode = fit.fit_decode(alone, [])
    assert decode["decode_context_s"] == pytest.approx(1e-6, rel=1e-2)
    assert decode["decode_step_s"] + decode["decode_sequence_s"] == pytest.approx(7.5e-3, rel=1e-3)


def test_errors_are_of_each_round() -> None:
    real = {"TTFT p50": 100.0, "TPOT p50": 10.0, "throughput": 50.0}
    model = {"TTFT p50": 110.0, "TPOT p50": 10.0, "throughput": 40.0}
    found = {one.metric: one for one in compare("x", [(real, model), (real, real)])}
    error = found["simulate, x: TTFT p50, relative error"]
    assert (error.value, error.bar, error.runs) == (pytest.approx(0.05), 0.15, 2)
    assert found["simulate, x: throughput, relative error"].value == pytest.approx(0.1)


@pytest.mark.slow
def test_the_control_plane_is_timed() -> None:
    found = measure_placing()
    assert set(found) < set(NAMES)
    assert found["place_pair_s"] > 0
    assert found["message_s"] > 0
