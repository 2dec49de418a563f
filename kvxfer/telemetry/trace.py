"""A trace of one process: events with monotonic nanoseconds, one JSON object a line.

CLOCK_MONOTONIC is the same for all processes of a host, so traces of several workers of one host
can be laid over one another.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import IO, Any


def now_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC."""
    return time.monotonic_ns()


class Trace:
    """Appends events to a file, or to nothing when `path` is None. Any thread may call."""

    def __init__(self, worker_id: str, path: Path | None) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._file: IO[str] | None = path.open("a", buffering=1) if path else None

    def event(self, name: str, *, at_ns: int | None = None, **fields: Any) -> None:
        if self._file is None:
            return
        record = {"at_ns": at_ns or now_ns(), "worker": self._worker_id, "event": name, **fields}
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file in the order they were written; a torn last line is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
