"""Processes of the service that start in milliseconds: forked from one that has imported all.

The server is `python -m support.fork_server FD`, one thread, before any CUDA context, NIXL agent or
ZMQ context exists: what fork does not copy (threads, contexts) is made in the child, for real.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

from support.commands import Finished
from support.forked import PREPARED, run_command

TESTS = Path(__file__).parent.parent
START_TIMEOUT_S = 120.0
MAX_BYTES = 1 << 16


class ForkServer:
    """The test's end. Any thread. A context: its children end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = [found] if (found := os.environ.get("PYTHONPATH")) else []
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), *given])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=TESTS.parent,
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(START_TIMEOUT_S)
        hello = json.loads(self._socket.recv(MAX_BYTES))
        assert hello["threads"] == 1, "fork copies only the thread that calls it"
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(START_TIMEOUT_S)

    def fork(self, order: dict[str, Any], log: int, told: int, *more: int) -> int:
        """The pid of a child that obeys `order`; all descriptors stay the caller's too."""
        answer: int = self._ask({"do": "fork", **order}, [log, told, *more])["pid"]
        return answer

    def start(self, module: str, *arguments: str, log: Path | None = None) -> ForkedCommand:
        """`python -m MODULE ARGUMENTS…` in a process of its own; its output goes to `log`."""
        return ForkedCommand(self, {"command": [module, *arguments]}, log)

    def run(self, module: str, *arguments: str, timeout_s: float = 60.0) -> Finished:
        """As `start`, to its end."""
        command = self.start(module, *arguments)
        try:
            out, err = command.communicate(timeout_s)
        finally:
            command.kill()
        return Finished(command.wait(0.0), out, err)

    def pipe(self, script: Path, *arguments: str) -> PipedCommand:
        """`python SCRIPT ARGUMENTS…`, with this process's environment and pipes to talk by."""
        return PipedCommand(self, [str(script), *arguments])

    def wait(self, pid: int, timeout_s: float) -> int:
        """Its exit code (-N: signal N), once. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [], timeout_s)
            finally:
                os.close(fd)
        while (code := self._ask({"do": "wait", "pid": pid}, [])["code"]) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} did not end in {timeout_s:g} s")
            time.sleep(0.005)
        return int(code)

    def _ask(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            answer: dict[str, Any] = json.loads(self._socket.recv(MAX_BYTES))
        return answer


class ForkedCommand:
    """As a Popen whose output is text: in temporary files where there is no log."""

    def __init__(
        self, server: ForkServer, order: dict[str, Any], log: Path | None, ready_fd: int = -1
    ) -> None:
        """`ready_fd` is given to a command that the order calls watched; it stays the caller's."""
        self._server = server
        self._order = order
        self.returncode: int | None = None
        self._texts: list[str] = []
        self._files: list[IO[bytes]] = []
        with contextlib.ExitStack() as undo:
            if log is not None:
                out = undo.enter_context(log.open("wb")).fileno()
                err = ready_fd if ready_fd >= 0 else out
            else:
                self._files = [undo.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
                out, err = (file.fileno() for file in self._files)
            self.pid = server.fork(order, out, err)
            if log is None:
                undo.pop_all()

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            try:
                self.returncode = self._server.wait(self.pid, timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._order["command"], timeout) from None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote, where that is in no log, once it has ended."""
        self.wait(timeout)
        while self._files:
            with self._files.pop(0) as file:
                file.seek(0)
                self._texts.append(file.read().decode())
        out, err = self._texts
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedCommand(ForkedCommand):
    """As a Popen with pipes, of text; what it wrote to stderr comes with its end."""

    def __init__(self, server: ForkServer, command: list[str]) -> None:
        with contextlib.ExitStack() as undo:
            theirs, ours = os.pipe(), os.pipe()
            self.stdin = undo.enter_context(os.fdopen(theirs[1], "w"))
            self.stdout = undo.enter_context(os.fdopen(ours[0], "r"))
            errors = undo.enter_context(tempfile.TemporaryFile())
            self._server = server
            self._order = {"command": command, "environment": dict(os.environ)}
            self.returncode = None
            self._texts = []
            self._files = [errors]
            try:
                self.pid = server.fork(self._order, ours[1], errors.fileno(), theirs[0])
            finally:
                os.close(theirs[0])
                os.close(ours[1])
            undo.pop_all()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Its input ends; what it wrote that was not read, once it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait(timeout)
        if not self._texts:
            with self.stdout, self._files[0] as errors:
                errors.seek(0)
                self._texts = [self.stdout.read(), errors.read().decode()]
        return self._texts[0], self._texts[1]


def main(fd: int) -> None:
    import support.null_process

    for name in PREPARED:
        importlib.import_module(name)
    _load_transport()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=fd) as told:
        told.send(json.dumps({"threads": len(list(Path("/proc/self/task").iterdir()))}).encode())
        while True:
            data, fds, _, _ = socket.recv_fds(told, MAX_BYTES, 3)
            if not data:
                return
            order = json.loads(data)
            if order["do"] == "wait":
                pid, status = os.waitpid(order["pid"], os.WNOHANG)
                answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
            else:
                pid = os.fork()
                if not pid:
                    told.close()
                    is_command = "command" in order
                    _run(_command if is_command else support.null_process.run_child, order, fds)
                answer = {"pid": pid}
            for one in fds:
                os.close(one)
            told.send(json.dumps(answer).encode())


def _load_transport() -> None:
    """NIXL's library, and its plugin for UCX, which an agent would take 0.4 s to load."""
    from connectors.nixl_api import load_nixl

    bindings = Path(load_nixl().nixlBind.__file__)  # SITE/nixl_cuN/_bindings…so
    plugin = bindings.parent.with_suffix(".libs") / "nixl" / "libplugin_UCX.so"
    if plugin.exists():
        ctypes.CDLL(str(plugin))


def _command(order: dict[str, Any], fds: list[int]) -> int:
    """What is `watched` tells of its start by the second descriptor, as LocalLauncher's workers."""
    is_watched = order.get("watched", False)
    for fd, target in zip((fds[0], fds[0]) if is_watched else fds, (1, 2, 0), strict=False):
        os.dup2(fd, target)
    module, *arguments = order["command"]
    if is_watched:
        os.setsid()
        arguments += ["--ready-fd", str(fds[1])]
    if order.get("namespaces"):
        from kvxfer.bench.netns import enter

        enter(order["namespaces"])
    return run_command(module, arguments)


def _run(body: Any, order: dict[str, Any], fds: list[int]) -> None:
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable(fds[0])
        os.environ.update(order.get("environment", {}))
        code = body(order, fds)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
