"""Wrong messages at every port of prefill, decode and router, with valid keys and with none: nobody
crashes, nothing grows, and a real hand-over works afterwards."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.attack import Attack
from support.cluster import Cluster
from support.fixtures import cluster, num_open_files
from support.keys import KeyRing
from support.wrong_messages import TYPES

from kvxfer.worker import liveness

__all__ = ["cluster"]

FEW, MANY = 2_000, 100_000
GROWTH_BYTES = 24 << 20
"""What allocators keep, at the most; a leak of 1 KiB a message would be four times that."""

FOR_ROUTERS = {"Welcome", "Heartbeat", "Token", "Finished", "Status", "CacheState", "HelloWanted"}
"""But for Reject and Goodbye, which are never sent to it."""


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def attack(cluster: Cluster, path: Path, num: int, seed: int) -> Attack:
    found = Attack(cluster, KeyRing(path), seed)
    try:
        before, after = _send(found, num)
    finally:
        found.stop()
    found.heal()
    found.serve()
    cluster.until_idle()
    print(f"\nsent: {dict(found.sent)}; grown by {(after[0] - before[0]) / 1e6:.1f} MB")
    for role, handled in found.handled.items():
        print(f"{role}: {table(handled, found.delivered[role])}")
    print(f"router, delivered: {dict(found.delivered['router'])}")
    assert after[0] - before[0] < GROWTH_BYTES
    assert abs(after[1] - before[1]) < 40  # connections that come and go
    return found


def _send(found: Attack, num: int) -> list[tuple[int, int]]:
    """Resident bytes and open descriptors after a quarter, and after all."""
    found.learn()
    measured = []
    for part in (num // 4, num - num // 4):
        found.send(part)
        measured.append((resident_bytes(), num_open_files()))
    return measured


def table(handled: Counter[str], delivered: Counter[str]) -> str:
    cells = (
        f"{name} {delivered[name]} ({handled[name + ' taken']}+{handled[name + ' refused']})"
        for name in sorted(TYPES)
    )
    return "type delivered (taken+refused by its handler): " + ", ".join(cells)


def check_reached(found: Attack) -> None:
    """Every message was decoded by both roles, and every handler was reached."""
    for role, worker in (("prefill", found.prefill), ("decode", found.decode)):
        assert {name for name in TYPES if not found.delivered[role][name]} == set()
        handled = {name.split()[0] for name in found.handled[role]}
        assert {kind.__name__ for kind in worker.loop._handlers} == handled
        counts = found.turned_away(worker)
        for kind in ("malformed_messages", "misplaced_messages", "wrong_messages"):
            assert counts[kind] > 0
        assert counts["refused_connections"] == 0  # strangers do not come so far
    # What is not for a router it drops alike, whichever of them comes.
    assert set(found.delivered["router"]) >= FOR_ROUTERS


@pytest.fixture(autouse=True)
def greets_at_once(monkeypatch):
    """Whoever was lost for a wrong message is met again soon, to be wrong once more."""
    monkeypatch.setattr(liveness, "HELLO_RETRY_S", 0.05)


@pytest.mark.timeout(60)
def test_wrong_messages_at_every_port(cluster, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    check_reached(attack(cluster, tmp_path, FEW, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_great_many_wrong_messages_at_every_port(cluster, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    check_reached(attack(cluster, tmp_path, MANY, seed=2))
