"""The figures that the campaigns of this folder leave."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fault_record import CAMPAIGNS, ROUNDS_VARIABLE, FaultRecord
from support.violations import kind_of

from kvxfer.bench.report import measured_commit

RECORD = FaultRecord()
HAS_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def fault_record() -> FaultRecord:
    return RECORD


@pytest.fixture(scope="session")
def counts() -> dict[str, Counter[str]]:
    return RECORD.counts


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is asked for, before `-k` takes some of it away."""
    if config.getoption("--record") is not None:
        measured_commit()  # now: the first file that is written changes the tree
    for item in items:
        if (campaign := _campaign(item)) is not None:
            RECORD.wanted[campaign] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Each test is a case, counted once however often it fails; but for those that count their
    cases by themselves, of which only what fails around the test is counted here."""
    report = yield
    campaign = _campaign(item)
    counts_itself = "results" in getattr(item, "fixturenames", ())
    if campaign is None or (counts_itself and report.when == "call"):
        return report
    tally = RECORD.tally(campaign)
    tally["cases"] += report.when == "setup" and not counts_itself
    tally["skipped"] += bool(report.skipped)
    if report.failed and call.excinfo is not None and not item.stash.get(HAS_FAILED, False):
        item.stash[HAS_FAILED] = True
        tally["failed"] += 1
        tally[kind_of(call.excinfo.value)] += 1
    return report


def _campaign(item: pytest.Item) -> str | None:
    """Which one a test belongs to: none where it only looks whether there is a test."""
    if item.name.startswith("test_there_is_a_test_of"):
        return None
    return CAMPAIGNS.get(item.path.stem, ("", None))[1]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Printed, and written where --record says."""
    for name, found in RECORD.counts.items():
        told = ", ".join(f"{what}: {number}" for what, number in sorted(found.items()))
        terminalreporter.write_line(f"{name}: {told}")
    directory: Path | None = config.getoption("--record")
    if directory is not None:
        for path in RECORD.write(directory, _command(config)):
            terminalreporter.write_line(f"written: {path}")


def _command(config: pytest.Config) -> str:
    rounds = os.environ.get(ROUNDS_VARIABLE, "")
    words = shlex.join(["./deploy/test.sh", *config.invocation_params.args])
    return f"{ROUNDS_VARIABLE}={rounds} {words}" if rounds else words
