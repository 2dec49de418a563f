"""Wrong messages at every port of prefill, decode and router, with valid keys, with wrong ones and
with none: nobody crashes, nothing grows, and a real hand-over works afterwards."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.attack import Attack
from support.attack_figures import NAME, coverage, figures, turned_away
from support.cluster import Cluster
from support.fault_record import FaultRecord
from support.fixtures import cluster, num_open_files
from support.keys import KeyRing
from support.wrong_messages import TYPES

from kvxfer.worker import liveness

__all__ = ["cluster"]

FEW, MANY = 2_000, 100_000
LAST_WORDS = {"Goodbye", "Reject"}
"""What `Attack.last_words` says."""


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def attack(cluster: Cluster, path: Path, num: int, seed: int, record: FaultRecord) -> None:
    """`record` is of the great one."""
    found = Attack(cluster, KeyRing(path), seed)
    crashes, began = 1, time.monotonic()
    measured = [(0, 0)]
    try:
        found.learn()
        measured = _send(found, num)
        found.last_words()
        crashes = 0
    finally:
        took_s = time.monotonic() - began
        grown = measured[-1][0] - measured[0][0], measured[-1][1] - measured[0][1]
        made = figures(found, MANY, grown, took_s, crashes)
        record.add(NAME, *made)
        found.stop()
    found.heal()
    found.serve()
    cluster.until_idle()
    show(found)
    missed = [one.metric for one in made if not one.ok and one.metric != f"{NAME}: sent"]
    assert not missed
    assert all(turned_away(found).values())


def _send(found: Attack, num: int) -> list[tuple[int, int]]:
    """Resident bytes and open descriptors after a quarter, and after all."""
    measured = []
    for part in (num // 4, num - num // 4):
        found.send(part)
        measured.append((resident_bytes(), num_open_files()))
    for _ in range(10):  # what was lost with a connection: few messages leave that to chance
        if not {name for one in coverage(found) for name in one.missing} - LAST_WORDS:
            break
        found.send(num // 10)
    return measured


def show(found: Attack) -> None:
    print(f"\nsent: {dict(found.sent)}; turned away: {turned_away(found)}")
    for role, handled in found.handled.items():
        print(f"{role}: {table(handled, found.delivered[role])}")
    print(f"router, delivered: {dict(found.delivered['router'])}")
    for one in coverage(found):
        print(one)


def table(handled: Counter[str], delivered: Counter[str]) -> str:
    cells = (
        f"{name} {delivered[name]} ({handled[name + ' taken']}+{handled[name + ' refused']})"
        for name in sorted(TYPES)
    )
    return "type delivered (taken+refused by its handler): " + ", ".join(cells)


@pytest.fixture(autouse=True)
def greets_at_once(monkeypatch):
    """Whoever was lost for a wrong message is met again soon, to be wrong once more."""
    monkeypatch.setattr(liveness, "HELLO_RETRY_S", 0.05)


@pytest.mark.timeout(60)
def test_wrong_messages_at_every_port(cluster, tmp_path, caplog, fault_record):
    caplog.set_level(logging.CRITICAL)
    attack(cluster, tmp_path, FEW, seed=1, record=fault_record)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_great_many_wrong_messages_at_every_port(cluster, tmp_path, caplog, fault_record):
    caplog.set_level(logging.CRITICAL)
    attack(cluster, tmp_path, MANY, seed=2, record=fault_record)
