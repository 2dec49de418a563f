"""`kvxfer serve`, or `kvxfer router`, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from support.commands import KVXFER, ROOT
from support.running import wait_until


class Served:
    """A `kvxfer serve`, or another `command`, whose output is read for what it says."""

    def __init__(
        self, directory: Path, *options: str, command: str = "serve", **variables: str
    ) -> None:
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*KVXFER, command, *options], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, env={**os.environ, "TMPDIR": str(directory), **variables},
            )  # fmt: skip

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exception: object) -> None:
        """It ends by SIGINT or is killed, and leaves no directory."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        assert [path.name for path in self.out.parent.glob("kvxfer-serve-*")] == []

    def url(self) -> str:
        """Once it is ready."""

        def said() -> bool:
            assert self.process.poll() is None, self.err.read_text()
            return "\ncurl " in self.out.read_text()

        wait_until(said, 120, "ready")
        ready = self.out.read_text().splitlines()[0]
        assert ready.startswith("ready: http://127.0.0.1:"), ready
        return ready.split()[1]

    def complete(self, max_tokens: int = 8) -> str:
        body = {"model": "tiny", "prompt": "HAMLET.\nTo be", "max_tokens": max_tokens, "seed": 1}
        return str(ask(self.url() + "/v1/completions", body)["choices"][0]["text"])

    def end(self, number: int) -> float:
        """Seconds from the signal to the end, which is good."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(30) == 0, self.err.read_text()
        return time.monotonic() - began_s


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
