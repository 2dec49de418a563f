"""Numbers as Prometheus reads them, and the texts of many workers made one."""

import contextlib
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exposition import read, value

from kvxfer.telemetry.families import FAMILIES, ROUTER
from kvxfer.telemetry.metrics import LONGEST_LABEL, Samples, Tally
from kvxfer.telemetry.request_metrics import REASONS, RequestMetrics

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_names_follow_the_conventions(family):
    assert re.fullmatch(r"kvxfer(_[a-z0-9]+)+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert bool(family.buckets) == (family.kind == "histogram")
    assert list(family.buckets) == sorted(set(family.buckets))
    if family.kind == "histogram":
        assert family.name.endswith("_seconds")
    assert family.help.endswith(".") and family.help.isprintable()
    assert not {"worker", "role", "le"} & set(family.labels), "the router adds these"


def test_a_tally_counts_each_value_in_one_bucket_and_all_below():
    tally = Tally((1.0, 2.5))
    for seen in (0.5, 1.0, 1.5, 2.5, 9.0):
        tally.observe(seen)
    assert tally.cumulative() == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert tally.sum == 14.5


def test_the_text_has_each_sample_under_its_family():
    samples, tally = Samples(), Tally(FAMILIES["kvxfer_growth_seconds"].buckets)
    tally.observe(0.03)
    samples.add_tally("kvxfer_growth_seconds", tally)
    samples.add("kvxfer_blocks", 7, state="free")
    samples.add("kvxfer_blocks", 2, state="used")
    odd = 'a"b\\c\nd'
    samples.add("kvxfer_transfer_bytes_total", 2**53, connector=odd, direction="push")
    text = samples.text()
    assert value(text, "kvxfer_blocks", state="used") == 2
    assert value(text, "kvxfer_transfer_bytes_total", connector=odd, direction="push") == 2**53
    assert value(text, "kvxfer_growth_seconds_bucket", le="0.025") == 0
    assert value(text, "kvxfer_growth_seconds_bucket", le="0.05") == 1
    assert value(text, "kvxfer_growth_seconds_sum") == 0.03
    for line in ("# TYPE kvxfer_blocks gauge", "# TYPE kvxfer_transfer_bytes_total counter"):
        assert text.count(line) == 1


def worker_text(free):
    samples = Samples()
    samples.add("kvxfer_blocks", free, state="free")
    samples.add("kvxfer_peers", 1)
    tally = Tally(FAMILIES["kvxfer_growth_seconds"].buckets)
    tally.observe(free)
    samples.add_tally("kvxfer_growth_seconds", tally)
    return samples.text()


def test_many_workers_become_one_exposition():
    merged = Samples()
    assert merged.add_text(worker_text(5), worker="prefill-0", role="prefill") == 0
    assert merged.add_text(worker_text(6), worker="decode-0", role="decode") == 0
    text = merged.text()
    assert set(read(text)) == {"kvxfer_blocks", "kvxfer_peers", "kvxfer_growth_seconds"}
    assert text.count("# HELP kvxfer_growth_seconds ") == 1
    for free, worker in ((5, "prefill"), (6, "decode")):
        labels = {"worker": f"{worker}-0", "role": worker}
        assert value(text, "kvxfer_blocks", state="free", **labels) == free
        assert value(text, "kvxfer_growth_seconds_sum", **labels) == free
        assert value(text, "kvxfer_growth_seconds_bucket", le="+Inf", **labels) == 1


def test_two_that_say_they_are_the_same_worker_do_not_break_it():
    merged = Samples()
    for free in (5, 6):
        merged.add_text(worker_text(free), worker="w", role="decode")
    assert value(merged.text(), "kvxfer_blocks", state="free", worker="w", role="decode") == 5


STRANGE = {
    "another metric": ("go_threads 3\n", 1),
    "an unknown one of our prefix": ("kvxfer_nonsense 3\n", 1),
    "other labels": ('kvxfer_blocks{state="free",request="r"} 3\n', 1),
    "no labels": ("kvxfer_blocks 3\n", 1),
    "a bucket without a bound": ("# TYPE kvxfer_growth_seconds histogram\n"
                                 "kvxfer_growth_seconds_bucket 3\n", 1),
    "a worker of its own choice": ('kvxfer_peers{worker="other"} 3\n', 1),
    "another kind": ("# TYPE kvxfer_peers counter\nkvxfer_peers 3\n", 1),
    "nothing": ("", 0),
}  # fmt: skip


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_not_ours_is_left_out(what):
    text, strange = STRANGE[what]
    merged = Samples()
    assert merged.add_text(text, worker="w", role="decode") == strange
    assert read(merged.text()) == {}


@pytest.mark.parametrize(
    "text", ["{", "kvxfer_blocks{", "x y z", "# TYPE a b\na 1", 'a{b="c} 1', "# TYPE a", "a{b} 1"]
)
def test_what_is_no_exposition_is_a_value_error_and_changes_nothing(text):
    merged = Samples()
    with pytest.raises(ValueError):
        merged.add_text(worker_text(1) + text, worker="w", role="decode")
    assert merged.text() == ""


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=120) | st.text("kvxfer_peers{}\"=,\\# \n1TYPE'", max_size=60))
def test_any_text_is_a_value_error_or_a_valid_exposition(text):
    merged = Samples()
    with contextlib.suppress(ValueError):
        merged.add_text(text, worker="w", role="decode")
    read(merged.text())


def test_labels_are_bounded():
    merged = Samples()
    merged.add_text(worker_text(5), worker="w" * 5000, role="decode")
    assert value(merged.text(), "kvxfer_peers", worker="w" * LONGEST_LABEL, role="decode") == 1


def test_the_router_counts_requests():
    metrics = RequestMetrics()
    metrics.load = lambda: (3, 4)
    metrics.observe_first_token(0.2)
    for gap in (0.01, 0.02):
        metrics.observe_inter_token(gap)
    metrics.observe_end("stop", 0.5, prompt_tokens=10, generation_tokens=3)
    metrics.observe_end("nonsense of a peer", 0.5, prompt_tokens=5, generation_tokens=0)
    metrics.scrape_failed()
    text = metrics.gather().text()
    assert set(read(text)) == {family.name for family in ROUTER}
    assert value(text, "kvxfer_time_to_first_token_seconds_count") == 1
    assert value(text, "kvxfer_inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert value(text, "kvxfer_e2e_request_latency_seconds_count") == 2
    assert value(text, "kvxfer_prompt_tokens_total") == 15
    assert value(text, "kvxfer_generation_tokens_total") == 3
    ended = {r: value(text, "kvxfer_request_success_total", finished_reason=r) for r in REASONS}
    assert ended == {**dict.fromkeys(REASONS, 0), "stop": 1, "error": 1}
    assert value(text, "kvxfer_num_requests_waiting") == 4
    assert value(text, "kvxfer_scrape_failures_total") == 1
    assert all(math.isfinite(v) for samples in read(text).values() for v in samples.values())


def test_readme_lists_every_metric_and_no_other():
    chapter = README.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(kvxfer_[a-z0-9_]+)`(?:\{([a-z_, ]*)\})? \| (\w+) \|", chapter, re.M)
    told = {name: (kind, tuple(filter(None, labels.split(", ")))) for name, labels, kind in rows}
    assert told == {f.name: (f.kind, f.labels) for f in FAMILIES.values()}
    assert len(rows) == len(told)
