"""Fixtures that several folders share (their conftest.py files import them)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster

from kvxfer.control.channel import Channel


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


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[type, int]]:
    """Call with types: the first message of each, or as many as told, never arrives. Returns how
    many of each are still to be lost."""
    left: dict[type, int] = {}
    original = Channel.send

    def send(self: Channel, peer: str, message: Any) -> None:
        if left.get(type(message), 0):
            left[type(message)] -= 1
            return
        original(self, peer, message)

    monkeypatch.setattr(Channel, "send", send)

    def lose(*kinds: type, count: int = 1) -> dict[type, int]:
        left.update(dict.fromkeys(kinds, count))
        return left

    return lose


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call with types: each message of them is sent twice."""
    twice: set[type] = set()
    original = Channel.send

    def send(self: Channel, peer: str, message: Any) -> None:
        original(self, peer, message)
        if type(message) in twice:
            original(self, peer, message)

    monkeypatch.setattr(Channel, "send", send)
    return lambda *kinds: twice.update(kinds)
