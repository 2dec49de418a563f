"""Programs beside a test: started with a log each, and surely ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GRACE_S = 20.0


class Processes:
    """A context. Programs end in the order in which they were started, the last one first."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def start(self, name: str, words: Sequence[str | Path], **environment: str) -> None:
        with self.log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Fails at once where a program has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} ended:\n{self._tail(name)}"
            logs = {name: self._tail(name, 300) for name in self._running}
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s: {logs}"
            time.sleep(0.2)

    def _tail(self, name: str, size: int = 3000) -> str:
        return self.log(name).read_text(errors="replace")[-size:]

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running.values()):
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)


def strings(environment: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items()}
