"""A command that runs while a test does something to it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from support.commands import KVXFER, ROOT, Finished
from support.fork_server import ForkedCommand, ForkServer
from support.forked import name_of

Running = subprocess.Popen[str] | ForkedCommand


@contextmanager
def running_demo(
    log_dir: Path, *options: str, server: ForkServer | None = None
) -> Iterator[Running]:
    """`kvxfer demo`, logging to `log_dir`; killed at the end if it still runs. With a `server` it
    and its workers are forked, as their imports are not what is tested."""
    arguments = ("demo", "--keep-logs", str(log_dir), *options)
    process: Running
    if server is not None:
        process = server.start("kvxfer.cli", *arguments)
    else:
        process = subprocess.Popen(
            [*KVXFER, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def worker(process: Running, role: str) -> psutil.Process:
    """The child of the demo that runs `python -m role`."""
    for child in psutil.Process(process.pid).children():
        if role in child.cmdline() or child.name() == name_of(role).decode():
            return child
    raise AssertionError(f"the demo has no {role} process")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def log_says(log_dir: Path, role: str, text: str) -> bool:
    path = log_dir / f"{role}.log"
    return path.exists() and text in path.read_text(errors="replace")


def traced(log_dir: Path, role: str, event: str) -> bool:
    path = log_dir / f"{role}.trace.jsonl"
    return path.exists() and f'"event": "{event}"' in path.read_text()


def end(process: Running, number: signal.Signals, timeout_s: float) -> Finished:
    """Send a signal and wait; the time limit is part of what is tested."""
    process.send_signal(number)
    out, err = process.communicate(timeout=timeout_s)
    return Finished(process.returncode, out, err)
