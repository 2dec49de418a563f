"""The processes of a `support.service`: started from the fork server, killed, stopped, counted."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import ForkServer

START_TIMEOUT_S = 10.0
_ports = itertools.count(20_000 + os.getpid() % 400 * 20)
_ports_lock = threading.Lock()


def free_port() -> int:
    """One that no ephemeral port is, so that nobody takes it while its owner is being restarted."""
    with _ports_lock:
        for port in _ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port
    raise AssertionError("no port is free")


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)


class Process:
    """One of the three, which may be started again at the same address."""

    def __init__(self, server: ForkServer, order: dict[str, Any], log: Path) -> None:
        self._server = server
        self.order = order
        self.log = log
        self.pid_path = log.with_suffix(".pid")
        self.role: str = order["role"]
        self.pid = 0
        self.starts = 0

    def start(self) -> None:
        """Returns once it is ready."""
        self.launch()
        self._wait_ready(time.monotonic() + START_TIMEOUT_S)
        self.took_s = time.monotonic() - self.began_s

    def launch(self) -> None:
        """As `start`, but at once."""
        assert not self.pid
        self.began_s = time.monotonic()
        self._told, theirs = os.pipe()
        try:
            self._fork(theirs)
        finally:
            os.close(theirs)

    def _fork(self, told: int) -> None:
        log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self.pid = self._server.fork(self.order, log, told)
        finally:
            os.close(log)
        draft = self.pid_path.with_suffix(".draft")
        draft.write_text(str(self.pid))
        draft.rename(self.pid_path)
        self.starts += 1

    def _wait_ready(self, deadline_s: float) -> None:
        text = b""
        while b'"ready"' not in text:
            left = deadline_s - time.monotonic()
            is_told = left > 0 and select.select([self._told], [], [], left)[0]
            more = os.read(self._told, 4096) if is_told else b""
            assert more, f"{self.role} did not start: {text!r}\n{self.tail()}"
            text += more

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 5.0) -> int:
        code = self._server.wait(self.pid, timeout_s)
        self.pid = 0
        self._close()
        return code

    def _close(self) -> None:
        os.close(self._told)

    def end(self) -> None:
        """However it is."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def is_alive(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        return False

    def is_stopped(self) -> bool:
        return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def used(self) -> dict[str, int]:
        """What it may leak: descriptors (sockets and memory among them) and threads."""
        process = psutil.Process(self.pid)
        return {"descriptors": process.num_fds(), "threads": process.num_threads()}

    def open_files(self) -> list[str]:
        found = []
        for one in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(f"{one.name} {one.readlink()}")
        return found


class RouterProcess(Process):
    """Started at once, and met by workers when they are there; told and asked over a socket."""

    def start(self) -> None:
        self.launch()

    def launch(self) -> None:
        assert not self.pid
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fork(theirs.fileno())
        theirs.close()

    def _close(self) -> None:
        self.socket.close()


def num_failed(process: Process) -> int:
    """How often it did not reach a peer, by its own word. UCX keeps a socket of each time for as
    long as the agent lives; after a few the worker takes another (`worker.residency`)."""
    log = process.log.read_text(errors="replace") if process.log.exists() else ""
    return log.count("nixlBackendError: NIXL_ERR_BACKEND")
