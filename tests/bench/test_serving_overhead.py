"""`kvxfer bench serving-overhead` at toy size: every step of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvxfer.bench.serving_overhead import ServingOverheadOptions, run_serving_overhead

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]


def test_it_writes_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "serve-overhead.json"
    options = ServingOverheadOptions(requests=20, streams=30, beyond=5, tokens=8, json=path)
    run_serving_overhead(options)  # 1 if this machine is too busy for the bar of latency
    figures = {one["metric"]: one for one in json.loads(path.read_text())}
    assert figures["serve: of 30 streams at once came whole"]["value"] == 30
    told = "serve: of 5 beyond the bound were told 429 and when to come back"
    assert figures[told]["value"] == 5
    assert figures["serve: beyond it failed otherwise"]["value"] == 0
    assert 0 < figures["serve: time to first byte, router alone, p50"]["value"] < 1000
    assert figures["serve: time to first byte, router alone, p50"]["bar"] == 2
