"""The pure parts of `kvxfer bench serving`."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import TINY_MODEL

from kvxfer.bench.serving.kv_share import KvCounts, hand_overs
from kvxfer.bench.serving.load import arrivals
from kvxfer.bench.serving.metrics import Answer, Wanted, failures, summarise
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import make_round, read_trace
from kvxfer.bench.serving.results import Results, Side
from kvxfer.bench.serving.source import Source
from kvxfer.errors import UsageError
from kvxfer.telemetry.metrics import Samples, Tally

URL = "http://127.0.0.1:1"


def options(**more: Any) -> ServingOptions:
    return ServingOptions(**({"base_url": URL} | more))


# --- when requests come ---------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_pauses_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """Within five standard errors of 20,000 samples; the coefficient's is from a gamma's kurtosis
    (at most (6 / shape + 2) / 4 of its square)."""
    count, rate = 20_000, 50.0
    found = arrivals(count, rate, burstiness, np.random.default_rng(1))
    pauses = np.diff(found)
    assert found[0] == 0 and len(found) == count and (pauses >= 0).all()
    spread = 1 / math.sqrt(burstiness)
    assert abs(pauses.mean() * rate - 1) < 5 * spread / math.sqrt(count)
    error = spread * math.sqrt((6 / burstiness + 2) / 4 / count)
    assert abs(pauses.std() / pauses.mean() - spread) < 8 * error


def test_pauses_of_a_poisson_process_are_exponential() -> None:
    pauses = np.sort(np.diff(arrivals(20_000, 50.0, 1.0, np.random.default_rng(2))))
    ranks = np.arange(1, pauses.size + 1) / pauses.size
    distance = np.abs(ranks - (1 - np.exp(-50.0 * pauses))).max()
    assert distance < 1.95 / math.sqrt(pauses.size)  # Kolmogorov and Smirnov, at 0.1 %


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(5, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 5


# --- prompts --------------------------------------------------------------------------------------


def test_lengths_are_within_the_range_and_reach_its_ends() -> None:
    told = options(
        num_prompts=2000, random_input_len=10, random_output_len=5, random_range_ratio=0.2,
        random_prefix_len=3, request_rate=1.0,
    )  # fmt: skip
    found = make_round(told, [], 50, 0)
    assert {len(one.tokens) for one in found} == set(range(3 + 8, 3 + 13))
    assert {one.num_output for one in found} == set(range(4, 7))
    assert len({tuple(one.tokens[:3]) for one in found}) == 1
    assert {token for one in found for token in one.tokens} == set(range(50))


def test_a_round_is_a_function_of_the_seed_and_no_two_are_alike() -> None:
    told = options(num_prompts=5, request_rate=2.0)
    assert make_round(told, [], 99, 0) == make_round(told, [], 99, 0)
    assert make_round(told, [], 99, 0) != make_round(told, [], 99, 1)
    other = options(num_prompts=5, request_rate=2.0, seed=1)
    assert make_round(told, [], 99, 0) != make_round(other, [], 99, 0)


def line(timestamp: float, size: int, output: int = 2, **more: Any) -> str:
    told = {"timestamp": timestamp, "input_length": size, "output_length": output}
    return json.dumps(told | more)


def trace_file(directory: Path, *lines: str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(lines) + ("\n" if lines else ""))
    return path


def test_a_trace_gives_times_lengths_and_common_beginnings(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        line(1000, 600, hash_ids=[7, 8]),
        line(3000, 1100, 5, hash_ids=[7, 8, 9]),
        line(3000, 520, hash_ids=[4, 8]),
    )
    told = options(trace=path, trace_speed=2.0)
    first, second, third = make_round(told, read_trace(path), 1000, 0)
    assert [one.at_s for one in (first, second, third)] == [0, 1, 1]
    assert [len(one.tokens) for one in (first, second, third)] == [600, 1100, 520]
    assert [one.num_output for one in (first, second, third)] == [2, 5, 2]
    assert second.tokens[:600] == first.tokens
    assert third.tokens[:512] != first.tokens[:512]
    assert third.tokens[512:] == first.tokens[512:520]
    scaled = make_round(options(trace=path, trace_scale=0.1), read_trace(path), 1000, 0)
    assert [len(one.tokens) for one in scaled] == [60, 110, 52]
    assert scaled[1].tokens[:60] == scaled[0].tokens and scaled[0].num_output == 1
    assert len(make_round(options(trace=path, num_prompts=2), read_trace(path), 9, 0)) == 2


@pytest.mark.parametrize(
    ("lines", "where", "reason"),
    [
        ([], "trace.jsonl'", "is empty"),
        ([line(0, 1), ""], "trace.jsonl:2'", "is empty"),
        ([line(0, 1), "{"], "trace.jsonl:2'", "truncated"),
        ([line(0, 1), "[]", line(1, 1)], "trace.jsonl:2'", "object"),
        (['{"timestamp": 1, "input_length": 2}'], "trace.jsonl:1'", "output_length"),
        ([line(0, 0)], "trace.jsonl:1'", "input_length is 0"),
        ([line(0, 1, -1)], "trace.jsonl:1'", "output_length is -1"),
        ([line(-1, 1)], "trace.jsonl:1'", "timestamp is -1"),
        ([line(5, 1), line(4, 1)], "trace.jsonl:2'", "before the line above"),
        ([line(5, 1, hash_ids=[-2])], "trace.jsonl:1'", "hash_ids has -2"),
        ([line(0, 1), '{"timestamp": 1, "input_length": "x"}'], "trace.jsonl:2'", "input_length"),
    ],
)  # fmt: skip
def test_a_wrong_trace_is_refused_by_line(
    tmp_path: Path, lines: list[str], where: str, reason: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_trace(trace_file(tmp_path, *lines))
    assert where in str(refused.value) and reason in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl.*No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_prompts_that_the_model_does_not_take_are_refused_before_anything_starts() -> None:
    told = ServingOptions(model=str(TINY_MODEL), random_input_len=10_000, num_prompts=2)
    with pytest.raises(UsageError, match=r"random_input_len: 10128: .*the model takes \d+"):
        Source.of(told, []).round(0)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"base_url": ""}, "base_url"),
        ({"base_url": "", "model": "/nowhere"}, "model"),
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": -1.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"request_rate": 1.0, "trace": Path("t")}, "request_rate"),
        ({"burstiness": 0.0, "request_rate": 1.0}, "burstiness"),
        ({"burstiness": 2.0}, "burstiness"),
        ({"trace_speed": 2.0}, "trace_speed"),
        ({"max_concurrency": -1}, "max_concurrency"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"runs": 0}, "runs"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"random_vocab_size": 1}, "random_vocab_size"),
        ({"request_timeout_s": math.inf}, "request_timeout_s"),
        ({"metric_percentiles": "50,x"}, "metric_percentiles"),
        ({"metric_percentiles": "100"}, "metric_percentiles"),
        ({"percentile_metrics": "ttft,tbt"}, "percentile_metrics"),
        ({"goodput": ("ttft",)}, "goodput"),
        ({"goodput": ("itl:3",)}, "goodput"),
        ({"goodput": ("ttft:3", "ttft:4")}, "goodput"),
        ({"goodput": ("tpot:-1",)}, "goodput"),
        ({"compare_single": True}, "compare_single"),
        ({"verify": True}, "verify"),
        ({"worker_args": "--block-size 8"}, "worker_args"),
        ({"base_url": "", "model": str(TINY_MODEL), "worker_args": "'"}, "worker_args"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refused:
        options(**given).check()
    assert refused.value.field.startswith(field)


def test_a_key_is_never_shown() -> None:
    with pytest.raises(UsageError) as refused:
        options(api_key="sëcret").check()
    assert "cret" not in str(refused.value)


# --- metrics --------------------------------------------------------------------------------------

ANSWERS = st.lists(
    st.tuples(
        st.floats(1, 5),  # when it was sent
        st.lists(st.floats(0.001, 2), min_size=1, max_size=6),  # pauses before each event
        st.integers(0, 3),  # tokens beyond one an event
        st.booleans(),  # whether it failed
    ),
    min_size=1,
    max_size=12,
)


def answer(sent_s: float, pauses: list[float], more: int, failed: bool) -> Answer:
    made = Answer(num_input=10, num_asked=99, due_s=sent_s - 0.25, sent_s=sent_s)
    made.token_s = [sent_s + sum(pauses[: at + 1]) for at in range(len(pauses))]
    made.num_output = len(pauses) + more
    made.failure = "timeout" if failed else ""
    return made


def percentile(samples: list[float], percent: float) -> float:
    """Linear between the two nearest, the definition."""
    ordered, place = sorted(samples), percent / 100 * (len(samples) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@settings(max_examples=50)
@given(ANSWERS)
def test_a_summary_is_what_its_definitions_say(told: list[Any]) -> None:
    answers = [answer(*one) for one in told]
    limits = {"ttft": 900.0, "tpot": 600.0, "e2el": 3000.0}
    wanted = Wanted(("ttft", "itl"), (50.0, 99.0), limits, tells_late=True)
    found = summarise(answers, -1.0, wanted)
    whole = [(sent, pauses, more) for sent, pauses, more, failed in told if not failed]
    ttft = [1e3 * pauses[0] for _, pauses, _ in whole]
    itl = [1e3 * pause for _, pauses, _ in whole for pause in pauses[1:]]
    tpot = [
        1e3 * sum(pauses[1:]) / (len(pauses) + more - 1)
        for _, pauses, more in whole
        if len(pauses) + more > 1
    ]
    e2el = [1e3 * sum(pauses) for _, pauses, _ in whole]
    for name, samples in {"ttft": ttft, "itl": itl, "tpot": tpot, "e2el": e2el}.items():
        if not samples:
            assert not [key for key in found if key[0] == name]
            continue
        assert found[name, "mean"] == pytest.approx(statistics.fmean(samples), abs=1e-6)
        assert found[name, "median"] == pytest.approx(statistics.median(samples), abs=1e-6)
        assert found[name, "std"] == pytest.approx(statistics.pstdev(samples), abs=1e-5)
        has_percentiles = name in ("ttft", "itl")
        assert ((name, "p99") in found) is has_percentiles
        if has_percentiles:
            assert found[name, "p99"] == pytest.approx(percentile(samples, 99), abs=1e-6)
            assert found[name, "p50"] == pytest.approx(percentile(samples, 50), abs=1e-6)
    assert found["sent late", "p99"] == pytest.approx(250.0, abs=1e-6)
    assert failures(answers).total() == len(answers) - len(whole)
    if whole:
        took = max(sent + sum(pauses) for sent, pauses, _ in whole) + 1.0
        tokens = sum(len(pauses) + more for _, pauses, more in whole)
        assert found["throughput", "requests"] == pytest.approx(len(whole) / took)
        assert found["throughput", "output tokens"] == pytest.approx(tokens / took)
        assert found["throughput", "all tokens"] == pytest.approx((tokens + 10 * len(whole)) / took)


def test_goodput_counts_those_within_all_limits() -> None:
    answers = [
        answer(0.0, [0.1, 0.1], 0, False),  # good
        answer(0.0, [0.3, 0.1], 0, False),  # ttft
        answer(0.0, [0.1, 0.5], 0, False),  # tpot
        answer(0.0, [0.1], 0, False),  # one token has no tpot
        answer(0.0, [0.1, 0.1], 0, True),  # failed
        answer(0.0, [0.1, 1.8], 8, False),  # ends the round after 1.9 s; e2el
    ]
    wanted = Wanted((), (), {"ttft": 200.0, "tpot": 200.0, "e2el": 1000.0}, tells_late=False)
    found = summarise(answers, 0.0, wanted)
    assert found["goodput", "requests"] == pytest.approx(2 / 1.9)
    assert ("sent late", "p99") not in found


# --- KV's share -----------------------------------------------------------------------------------


def exposition(transfers: list[float], first_tokens: list[float], num_bytes: int) -> str:
    made, tallies = Samples(), (Tally([1.0]), Tally([1.0]))
    for tally, values in zip(tallies, (transfers, first_tokens), strict=True):
        for value in values:
            tally.observe(value)
    moved = {"connector": "peer", "direction": "pull"}
    made.add_tally("kvxfer_transfer_seconds", tallies[0], **moved)
    made.add_tally("kvxfer_time_to_first_token_seconds", tallies[1])
    made.add("kvxfer_transfer_bytes_total", num_bytes, **moved)
    return made.text()


def test_the_share_is_of_what_was_counted_in_between() -> None:
    before = KvCounts.read(exposition([0.5], [3.0], 1_000_000))
    after = KvCounts.read(exposition([0.5, 0.1, 0.1, 0.2], [3.0, 1.0, 1.0], 5_000_000))
    assert before is not None and after is not None
    found = after.since(before).summary()
    assert found["KV transfers", "share of TTFT"] == pytest.approx(0.2)
    assert found["KV transfers", "time of a request"] == pytest.approx(200)
    assert found["KV transfers", "size of a request"] == pytest.approx(2)
    assert before.since(before).summary() == {}


@pytest.mark.parametrize("text", ["", "<html>", "# TYPE a counter\na_total 1\n"])
def test_what_is_no_router_of_kvxfer_tells_nothing(text: str) -> None:
    assert KvCounts.read(text) is None


def test_hand_overs_are_joined_by_request(tmp_path: Path) -> None:
    prefill, decode = tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl"
    computed = [{"at_ns": 1_000_000, "event": "computed", "request": "cmpl-a-0", "worker": "p"}]
    computed.append({"at_ns": 9_000_000, "event": "computed", "request": "cmpl-a-0"})  # preempted
    prefill.write_text("".join(json.dumps(one) + "\n" for one in computed) + '{"at_ns": 5, "ev')
    filled = {"at_ns": 21_000_000, "event": "filled", "request": "cmpl-a-0", "blocks": [[1]]}
    decode.write_text(json.dumps(filled) + "\n")
    known, failed = answer(0.0, [0.1], 0, False), answer(0.0, [0.1], 0, True)
    unknown = answer(0.0, [0.1], 0, False)
    known.request_id = failed.request_id = "cmpl-a"
    unknown.request_id = "cmpl-b"
    [found] = hand_overs((prefill, decode, tmp_path / "none"), [known, failed, unknown])
    assert found.ms == pytest.approx(20) and found.share == pytest.approx(0.2)


# --- figures --------------------------------------------------------------------------------------


def test_ratios_are_of_neighbours_and_parts_of_rounds_count_only_alone() -> None:
    one, two = Side("P/D"), Side("single")
    for ours, theirs in ((10.0, 20.0), (30.0, 10.0), (20.0, 20.0)):
        one.add([], {("ttft", "median"): ours, ("ttft", "std"): 1.0}, is_whole=True)
        two.add([], {("ttft", "median"): theirs, ("ttft", "std"): 1.0}, is_whole=True)
    lost = answer(0.0, [0.1], 0, True)
    two.add([lost], {("ttft", "median"): 999.0}, is_whole=False)
    found = {figure.metric: figure for figure in Results(4, [one, two]).figures()}
    assert found["serving, P/D to single: ttft, median"].value == 1.0
    assert "serving, P/D to single: ttft, std" not in found
    assert found["serving, single: ttft, median"].value == 20.0
    assert found["serving, single: failed, timeout"].value == 1
    assert not found["serving, single: of 1 requests failed"].ok
    assert not found["serving, P/D: rounds that were whole"].ok
    for at, good in enumerate((0.0, 3.0, 1.0)):
        one.rounds[at]["goodput", "requests"], two.rounds[at]["goodput", "requests"] = good, 2.0
        one.rounds[at]["tpot", "median"], two.rounds[at]["tpot", "median"] = 1.0, good
    told = {figure.metric: figure for figure in Results(3, [one, two]).figures()}
    assert told["serving, P/D to single: goodput, requests"].value == 0.5  # with the 0 in it
    assert "serving, P/D to single: tpot, median" not in told
    alone = Side("service")
    alone.add([lost], {("ttft", "median"): 999.0}, is_whole=False)
    by_metric = {figure.metric: figure for figure in Results(1, [alone]).figures()}
    assert by_metric["serving, service: ttft, median"].value == 999.0
    assert by_metric["serving, service: rounds that were whole"].value == 0
