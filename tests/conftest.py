"""Every test leaves the machine as it found it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated


def worker_processes() -> list[str]:
    """Command lines of this checkout's worker processes that are alive now."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        is_worker = any(f"-m {name} " in command for name in ("prefill", "decode"))
        is_worker |= "kvxfer.worker.single" in command
        if is_worker and state != "Z" and command.startswith(sys.executable):
            found.append(command)
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208


@pytest.fixture
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a worker process or shared memory."""
    processes, memory = worker_processes(), shared_memory()
    yield
    assert worker_processes() == processes
    assert shared_memory() <= memory
