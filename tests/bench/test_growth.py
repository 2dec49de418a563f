"""`kvxfer bench growth`: real processes, real NIXL, verified bytes; figures as they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fork_server import ForkServer

from kvxfer.bench.report import Figure


def test_growth_is_measured_and_kept(tmp_path: Path, fork_server: ForkServer) -> None:
    kept = tmp_path / "growth.json"
    done = fork_server.run(
        "kvxfer.cli", "bench", "growth", "--gib", "0.01", "--runs", "1", "--json", str(kept),
        "--commit-bar-ms", "60000", "--first-byte-bar-ms", "0.000001",
    )  # fmt: skip
    assert done.code == 1, "a bar was missed"
    figures = json.loads(kept.read_text())
    assert [figure["ok"] for figure in figures] == [True, True, False]
    committed, registered, verified = (figure["value"] for figure in figures)
    assert 0 < committed <= registered <= verified
    needed = {
        "metric", "value", "unit", "bar", "better", "ok", "runs", "spread_iqr", "machine",
        "versions", "commit", "command",
    }  # fmt: skip
    assert all(needed == set(figure) for figure in figures)


@pytest.mark.parametrize(
    ("option", "value"), [("--gib", "0"), ("--runs", "0"), ("--layout", "XX"), ("--device", "tpu")]
)
def test_bad_options_are_refused(option: str, value: str, fork_server: ForkServer) -> None:
    done = fork_server.run("kvxfer.cli", "bench", "growth", option, value)
    done.check_one_clear_line(2, option.removeprefix("--"), value)


@pytest.mark.parametrize(
    ("better", "value", "bar", "ok"),
    [
        ("lower", 1.0, 2.0, True),
        ("lower", 3.0, 2.0, False),
        ("higher", 3.0, 2.0, True),
        ("higher", 1.0, 2.0, False),
        ("higher", 1.0, None, True),
    ],
)
def test_a_figure_is_judged_by_its_bar(better, value: float, bar: float | None, ok: bool) -> None:
    assert Figure.of("m", [value], "u", better, bar).ok is ok


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.of("m", [1.0, 2.0, 3.0, 4.0, 100.0], "u", "lower")
    assert figure.value == 3.0
    assert figure.runs == 5
    assert figure.spread_iqr > 0
