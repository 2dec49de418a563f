"""`kvxfer bench compare` for lists of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench_reports import report

from kvxfer.bench.compare import CompareOptions, run_compare
from kvxfer.errors import UsageError

FIGURE: dict[str, Any] = {
    "metric": "rate",
    "value": 10.0,
    "unit": "GB/s",
    "bar": 9.0,
    "better": "higher",
    "ok": True,
    "runs": 5,
    "spread_iqr": 0.5,
    "machine": "2 CPUs",
    "versions": {"python": "3.11"},
    "commit": "a" * 40,
    "command": "kvxfer bench rate",
}


def write(path: Path, *changes: dict[str, Any]) -> Path:
    path.write_text(json.dumps([{**FIGURE, **change} for change in changes]))
    return path


def test_each_metric_is_judged_by_what_is_better_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latency = {"metric": "latency", "better": "lower", "bar": None, "unit": "ms"}
    a = write(tmp_path / "a.json", {}, latency, {"metric": "gone"})
    b = write(
        tmp_path / "b.json",
        {"value": 8.0, "ok": False, "commit": "b" * 40},
        {**latency, "value": 8.0},
        {"metric": "new"},
    )
    assert run_compare(a, b, CompareOptions(json=True)) == 1
    found = json.loads(capsys.readouterr().out)
    outcomes = {change["name"]: change["outcome"] for change in found["changes"]}
    assert outcomes == {"rate": "regression", "latency": "gain"}
    assert (found["only_a"], found["only_b"]) == (["gone"], ["new"])
    assert found["changes"][0]["note"] == "misses its bar"
    assert found["commits"] == ["a" * 40, ", ".join(["a" * 40, "b" * 40])]
    assert run_compare(b, b, CompareOptions()) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("field", "value"),
    [("machine", "4 CPUs"), ("command", "kvxfer bench rate --runs 3"), ("unit", "MB/s")],
)
def test_runs_that_measured_something_else_are_refused(
    tmp_path: Path, field: str, value: str
) -> None:
    a = write(tmp_path / "a.json", {})
    with pytest.raises(UsageError) as caught:
        run_compare(a, write(tmp_path / "b.json", {field: value}), CompareOptions())
    assert caught.value.field == field
    assert value in str(caught.value) and str(FIGURE[field]) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{"metric": "other"}], "no metric in common"),
        ([{}, {}], "'rate' twice"),
        ([{"value": "much"}], "no list of figures"),
        ([{"value": 1.0}], "'rate' is ok, and misses its bar"),
        ([], "no metric in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, changes: list[dict[str, Any]], reason: str
) -> None:
    a = write(tmp_path / "a.json", {})
    with pytest.raises(UsageError, match=reason):
        run_compare(a, write(tmp_path / "b.json", *changes), CompareOptions())


def test_a_missing_file_and_a_report_against_figures_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", {})
    with pytest.raises(UsageError, match="No such file"):
        run_compare(a, tmp_path / "none.json", CompareOptions())
    report().write(tmp_path / "report.json")
    with pytest.raises(UsageError, match="no report of kvxfer bench connectors"):
        run_compare(a, tmp_path / "report.json", CompareOptions())
