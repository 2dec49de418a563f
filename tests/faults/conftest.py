"""The fork server of this folder, and the counts that its tests leave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import ForkServer

COUNTS: dict[str, Counter[str]] = {}
"""By campaign: what was done how often, and how what was asked for ended."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def counts() -> dict[str, Counter[str]]:
    return COUNTS


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Printed, and beside a --result-json as NAME-counts.json."""
    for name, found in COUNTS.items():
        told = ", ".join(f"{what}: {number}" for what, number in sorted(found.items()))
        terminalreporter.write_line(f"{name}: {told}")
    target: Path | None = config.getoption("--result-json")
    if target is not None and COUNTS:
        beside = target.with_name(f"{target.stem}-counts.json")
        beside.write_text(json.dumps(COUNTS, indent=1, sort_keys=True) + "\n")
