"""Runs one worker process on a node, for a launcher elsewhere. What a Ray actor does, without Ray.

The process has a log that nobody else sees: a file without a name, which is gone with us however we
end. Should we be killed, the kernel kills the worker (see `kvxfer.worker.process`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvxfer.launch.local import LocalLauncher
from kvxfer.launch.ray_seam import Look, Order

MOST_LOG_BYTES = 256 << 10
"""In one look; the rest follows in the next."""


class WorkerHost:
    """One thread, the one that made it: the kernel ends the worker with it. `stop` ends it."""

    def __init__(self, order: Order, ip: str) -> None:
        """Starts the process; raises OSError. `ip` is this node's."""
        self._ip = ip
        self._steps: list[str] = []
        with tempfile.TemporaryDirectory(prefix="kvxfer-ray-") as directory:
            self._launcher = LocalLauncher(Path(directory), self._on_step)
            self._worker = self._launcher.start(
                order.name,
                order.module,
                (*order.arguments, f"--listen={listen_at(order, ip)}"),
                environment=environment_of(order, os.environ),
            )
            self._log = os.open(self._worker.log, os.O_RDONLY | os.O_CLOEXEC)
        self._worker.log = Path(f"/proc/self/fd/{self._log}")

    def _on_step(self, name: str, text: str) -> None:
        self._steps.append(text)

    def look(self) -> Look:
        """Never blocks. After an ending the log is told to its end, a part in each look."""
        self._worker.read_events(self._on_step)
        ending = self._worker.ending()
        log = os.read(self._log, MOST_LOG_BYTES)
        has_said_all = ending is not None and len(log) < MOST_LOG_BYTES
        code = self._worker.process.returncode or 0
        return self._said(log, *((str(ending), code) if has_said_all else ("", 0)))

    def _said(self, log: bytes, ending: str = "", exit_code: int = 0) -> Look:
        steps, self._steps = tuple(self._steps), []
        return Look(
            ip=self._ip,
            pid=self._worker.process.pid,
            address=self._worker.address,
            is_ready=self._worker.is_ready,
            steps=steps,
            log=log,
            ending=ending,
            exit_code=exit_code,
        )

    def stop(self) -> Look:
        """End the process, and say what is left of its log. To be called once, at the end."""
        self._launcher.stop()
        log = os.read(self._log, MOST_LOG_BYTES)
        os.close(self._log)
        return self._said(log, "stopped", self._worker.process.returncode or 0)


def listen_at(order: Order, ip: str) -> str:
    host = "127.0.0.1" if order.is_on_loopback else f"[{ip}]" if ":" in ip else ip
    return f"tcp://{host}:0"


def environment_of(order: Order, node: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in node.items() if name not in order.without}
    return {**kept, **order.environment}
