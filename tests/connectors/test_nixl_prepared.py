"""NIXL told by prepared lists: the same bytes as by descriptors, through growth and revocation."""

from __future__ import annotations

import os
import time
from itertools import count

import numpy as np
import pytest

from connectors.nixl import NixlConnector
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

MIB = 1 << 20
DEADLINE_S = 30.0
_names = count()


def refuse_rows(*arguments: object) -> None:
    raise AssertionError("descriptors were told one by one")


def connect_pair() -> tuple[NixlConnector, NixlConnector, list[np.ndarray]]:
    """Two connectors of this process, each over a window of 2 MiB, the first half registered; the
    first knows the second."""
    rng = np.random.default_rng(11)
    windows = [rng.integers(0, 256, 2 * MIB, dtype=np.uint8) for _ in range(2)]
    made = []
    for window in windows:
        memory = MemoryWindow(int(window.ctypes.data), window.nbytes, "cpu")
        made.append(NixlConnector(f"pair-{os.getpid()}-{next(_names)}", memory))
        made[-1].register([Region(0, MIB // 2), Region(MIB // 2, MIB // 2)])
    left, right = made
    told = right.describe([Region(0, MIB // 2), Region(MIB // 2, MIB // 2)])
    left.connect("right", int(windows[1].ctypes.data), told)
    return left, right, windows


def move_pages(
    left: NixlConnector,
    right: NixlConnector,
    windows: list[np.ndarray],
    direction: Direction,
    seed: int,
    slots: int = 256,
) -> None:
    """100 pages of 4 KiB and 30 parts of pages to places by chance, and every byte checked."""
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(slots)[:130].astype(np.int64) * 4096 for _ in range(2))
    sizes = np.where(np.arange(130) < 100, 4096, 1024)
    plan = TransferPlan.of_runs(src, dst, sizes)
    source, target = windows if direction is Direction.PUSH else windows[::-1]
    expected = target.copy()
    for origin, to, size in zip(src, dst, sizes, strict=True):
        expected[to : to + size] = source[origin : origin + size]
    ticket = left.submit("right", direction, plan)
    deadline = time.monotonic() + DEADLINE_S
    while not (ended := left.poll()) and time.monotonic() < deadline:
        right.poll()
    assert ended == [TicketResult(ticket)]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("direction", Direction)
def test_prepared_lists_move_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    monkeypatch.setattr("connectors.nixl.lists_pay", lambda *_: True)
    left, right, windows = connect_pair()
    for _ in range(100):  # let what connecting begins come to its end
        left.poll(), right.poll()
    with monkeypatch.context() as patch:
        patch.setattr(left._epoch.agent._agent, "initialize_xfer", refuse_rows)
        for seed in range(3):
            move_pages(left, right, windows, direction, seed)
    later = Region(MIB, MIB)
    for side in (left, right):
        side.register([later])
    left.connect("right", int(windows[1].ctypes.data), right.describe([later]))
    for _ in range(100):
        left.poll(), right.poll()
    with monkeypatch.context() as patch:
        patch.setattr(left._epoch.agent._agent, "initialize_xfer", refuse_rows)
        move_pages(left, right, windows, direction, seed=3, slots=512)
    for side in (left, right):
        side.deregister([later])
    left.disconnect("right")
    told = right.describe([Region(0, MIB // 2), Region(MIB // 2, MIB // 2)])
    left.connect("right", int(windows[1].ctypes.data), told)
    with pytest.raises(ConnectorError, match="no registered region"):
        move_pages(left, right, windows, direction, seed=4, slots=512)
    move_pages(left, right, windows, direction, seed=5)
    left.close()
    right.close()
