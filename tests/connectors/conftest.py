"""A socket directory and processes over it, and what they leave: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.peer_processes import MakePeer, descriptors_and_mappings, peers_in


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Agents end when they are collected: here, and not under a later test that counts files."""
    yield
    gc.collect()


@pytest.fixture
def peer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "peers"
    path.mkdir(0o700)
    monkeypatch.setenv("KVXFER_PEER_DIR", str(path))
    return path


@pytest.fixture
def make_peer(peer_directory: Path) -> Iterator[MakePeer]:
    with peers_in(peer_directory) as make:
        yield make


@pytest.fixture
def conserved() -> Iterator[None]:
    """Descriptors and mappings of this process are at the end what they were."""
    before = descriptors_and_mappings()
    yield
    assert descriptors_and_mappings() == before
