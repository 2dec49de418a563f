"""Fixtures that several folders share (their conftest.py files import them)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Closed at the end, whatever happened; threads and descriptors that stay fail the test."""
    files, threads = num_open_files(), threading.active_count()
    found = Cluster()
    try:
        yield found
    finally:
        found.close()
    assert threading.active_count() == threads
    assert num_open_files() == files
