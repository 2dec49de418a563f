"""Workers started as a user starts them, whose logs are read for what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands import ROOT, TINY_MODEL
from support.fork_server import ForkedCommand, ForkServer
from support.running import wait_until

BUDGET = ("--memory-budget-bytes", str(1 << 30))


class HandStarted:
    """A worker process whose log is read for where it listens; forked where there is a `server`."""

    process: subprocess.Popen[bytes] | ForkedCommand

    def __init__(
        self,
        role: str,
        log: Path,
        *options: str,
        model: Path = TINY_MODEL,
        server: ForkServer | None = None,
    ) -> None:
        self.log = log
        budget = () if BUDGET[0] in options else BUDGET
        fixed = ("--model", str(model), "--kv-commit", "elastic", *budget)
        if server is not None:
            self.process = server.start(role, *fixed, *options, log=log)
            return
        command = [sys.executable, "-m", role, *fixed, *options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def address(self) -> str:
        wait_until(lambda: "listens on" in self.text, 30, "listening")
        return self.text.split("listens on ")[1].split()[0]

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        def seen() -> bool:
            assert text in self.text or self.process.poll() is None, self.text
            return text in self.text

        wait_until(seen, timeout_s, text)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=10)


@contextmanager
def hand_started(
    *arguments: str | Path, model: Path = TINY_MODEL, server: ForkServer | None = None
) -> Iterator[HandStarted]:
    role, log, *options = arguments
    worker = HandStarted(str(role), Path(log), *map(str, options), model=model, server=server)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait(timeout=10)
