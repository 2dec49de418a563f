"""Work in a process of its own: what comes back, and how it may end.

In a file of its own, since the new process imports it: without torch that is quick.
"""

from __future__ import annotations

import os
import time

import pytest

from kvxfer.bench.isolated import run_isolated
from kvxfer.errors import DeadlineExceeded, UsageError, WorkerDied


def _double(value: int) -> int:
    return 2 * value


def _refuse() -> None:
    raise UsageError("x", 1, "no")


def _vanish() -> None:
    os._exit(7)


def _sleep() -> None:
    time.sleep(60)


def test_isolated_work_answers_fails_or_is_ended() -> None:
    assert run_isolated(_double, 21, timeout_s=60) == 42
    with pytest.raises(WorkerDied, match="x: 1: no"):
        run_isolated(_refuse, timeout_s=60)
    with pytest.raises(WorkerDied, match="code 7"):
        run_isolated(_vanish, timeout_s=60)
    with pytest.raises(DeadlineExceeded):
        run_isolated(_sleep, timeout_s=0.5)
