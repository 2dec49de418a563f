"""What a campaign leaves: figures that are not ok where anything failed, or was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fault_record import FaultRecord
from support.violations import KINDS, Leak, kind_of

from kvxfer.bench.report import Figure


def written(record: FaultRecord, directory: Path, file: str) -> dict[str, dict]:
    record.write(directory, "a command")
    records = json.loads((directory / f"{file}.json").read_text())
    assert all(one["commit"] is not None and one["command"] == "a command" for one in records)
    return {one["metric"]: one for one in records}


def whole(campaign: str) -> FaultRecord:
    record = FaultRecord()
    record.wanted[campaign] = 7
    record.tally(campaign).update({"cases": 7, "messages lost": 3})
    return record


def test_a_whole_campaign_without_a_failure_is_ok(tmp_path: Path) -> None:
    found = written(whole("messages"), tmp_path, "control-messages")
    assert all(one["ok"] for one in found.values())
    assert found["messages: cases"]["value"] == 7
    assert found["messages: messages lost"]["value"] == 3
    assert {found[f"messages: {name}"]["bar"] for name in ("failed", "skipped", *KINDS)} == {0}


@pytest.mark.parametrize("name", ["failed", "skipped", *KINDS, "other problems"])
def test_whatever_failed_is_not_ok(tmp_path: Path, name: str) -> None:
    record = whole("links")
    record.tally("links")[name] += 1
    found = written(record, tmp_path, "control-links")
    assert [metric for metric, one in found.items() if not one["ok"]] == [f"links: {name}"]


def test_a_part_of_a_campaign_is_not_ok(tmp_path: Path) -> None:
    record = whole("every state")
    record.wanted["every state"] = 8
    assert not written(record, tmp_path, "control-faults")["every state: cases"]["ok"]


def test_campaigns_of_one_file_and_figures_of_their_own(tmp_path: Path) -> None:
    record = whole("every state")
    record.tally("field failures")["cases"] += 1
    for value in (1.0, 0.0):
        record.add("every state", Figure("every state: x", value, "", 0.0, "lower", 1, 0.0))
    found = written(record, tmp_path, "control-faults")
    assert found["every state: x"]["value"] == 0.0
    assert found["field failures: cases"]["value"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control-faults.json"]


def test_kinds_of_failures() -> None:
    assert kind_of(Leak("x")) == "leaks"
    assert kind_of(AssertionError("x")) == kind_of(OSError()) == "other problems"
