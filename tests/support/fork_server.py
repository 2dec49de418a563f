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
import runpy
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
from typing import Any

from support.commands import Finished

TESTS = Path(__file__).parent.parent
START_TIMEOUT_S = 60.0
MAX_BYTES = 1 << 16
PREPARED = (
    *("connectors.nixl", "connectors.peer", "decode.worker", "prefill.worker"),
    *("kvxfer.cli", "kvxfer.demo.run", "kvxfer.serve.prompts"),
)
"""What children need not import."""


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

    def fork(self, order: dict[str, Any], log: int, told: int) -> int:
        """The pid of a child that obeys `order`; both descriptors stay the caller's too."""
        answer: int = self._ask({"do": "fork", **order}, [log, told])["pid"]
        return answer

    def run(self, module: str, *arguments: str, timeout_s: float = 60.0) -> Finished:
        """`python -m MODULE ARGUMENTS…` in a process of its own, but for the time of its imports."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            order = {"command": [module, *arguments]}
            pid = self.fork(order, out.fileno(), err.fileno())
            try:
                code = self.wait(pid, timeout_s)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self.wait(pid, timeout_s)
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return Finished(code, *texts)

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
            data, fds, _, _ = socket.recv_fds(told, MAX_BYTES, 2)
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
                    _run(run_command if is_command else support.null_process.run_child, order, fds)
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


def run_command(order: dict[str, Any], fds: list[int]) -> int:
    """In the forked child: as a user's shell would start it."""
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
    module, *sys.argv[1:] = order["command"]
    sys.modules.pop(module, None)  # a program is not what was imported before it
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        assert error.code is None or isinstance(error.code, int), error.code
        return error.code or 0
    return 0


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
