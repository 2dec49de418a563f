"""All processes of a session, and the shared memory that they would leave if they were killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import DeadlineExceeded

SHARED_MEMORY = "/dev/shm/"


def members(session: int) -> list[int]:
    """Ids of the processes in it that have not ended."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, _, _, own_session, *_ = (
                (directory / "stat").read_text().rpartition(")")[2].split()
            )
            if int(own_session) == session and state not in "ZX":
                found.append(int(directory.name))
    return found


def kill_session(session: int, timeout_s: float) -> None:
    """SIGKILL to all in it, and to those they start meanwhile; what only they had of /dev/shm goes
    too. Raises DeadlineExceeded."""
    deadline_s = time.monotonic() + timeout_s
    shared: set[str] = set()
    while alive := members(session):
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"processes {alive} were killed and did not end")
        for pid in alive:
            shared |= set(_shared_memory(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for path in shared - {path for pid in _all() for path in _shared_memory(pid)}:
        Path(path).unlink(missing_ok=True)


def signal_session(session: int, number: signal.Signals) -> None:
    """To all that are in it now."""
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _all() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]


def _shared_memory(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            if path.startswith(SHARED_MEMORY) and not path.endswith(" (deleted)"):
                yield path
