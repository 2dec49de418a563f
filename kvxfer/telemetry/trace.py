"""A trace of one process: events with monotonic nanoseconds, one JSON object a line.

CLOCK_MONOTONIC is the same for all processes of a host, so traces of several workers of one host
can be laid over one another.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any


def now_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC."""
    return time.monotonic_ns()


class Trace:
    """Appends events to a file, or to nothing when `path` is None. Any thread may call.

    Events wait for `flush`: writing would hold up what they tell of.
    """

    def __init__(self, worker_id: str, path: Path | None) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._file: IO[str] | None = path.open("a") if path else None
        self._waiting: deque[dict[str, Any]] = deque()

    def event(self, name: str, *, at_ns: int | None = None, **fields: Any) -> None:
        if self._file is None:
            return
        self._waiting.append(
            {"at_ns": at_ns or now_ns(), "worker": self._worker_id, "event": name, **fields}
        )

    def flush(self) -> None:
        """Write whole lines."""
        with self._lock:
            if self._file is None or not self._waiting:
                return
            records = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._file.write("".join(json.dumps(record) + "\n" for record in records))
            self._file.flush()

    def close(self) -> None:
        self.flush()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file in the order they were written; a torn last line is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
