"""Worker processes on this host: started, watched, and surely ended.

Workers run in sessions of their own, so that Ctrl-C reaches only the launcher, which then ends
them in order; the kernel kills them should the launcher die first (see `kvxfer.worker.process`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.errors import DeadlineExceeded, KvxferError, WorkerDied

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""After SIGTERM; then SIGKILL. Keeps Ctrl-C under two seconds, and is what a worker gives its
threads in all: one is killed that is stuck, short of CPU, or loading a library, which hears no
signal."""
KILLED_TIMEOUT_S = 30.0
"""For the kernel to give a killed process's memory back: GiB of it, on a busy machine."""
OTHERS_TIMEOUT_S = 7.0
"""How long the others get to notice by themselves that one of them died."""

OnStep = Callable[[str, str], None]
"""(worker name, what it is doing now)"""


@dataclass
class WorkerProcess:
    """One child process; `log` holds what it wrote to stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    _events: int
    """Read end of the pipe on which the worker reports its start; owned."""
    address: str = ""
    is_ready: bool = False
    failure: str = ""
    _partial: bytes = field(default=b"", repr=False)

    def read_events(self, on_step: OnStep) -> None:
        """Take in what the worker has said since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._events, 65536):
                self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            record = json.loads(line)
            if record["event"] == "listening":
                self.address = record["address"]
            elif record["event"] == "ready":
                self.is_ready = True
            elif record["event"] == "failed":
                self.failure = record["text"]
            else:
                on_step(self.name, record["text"])

    def ending(self) -> WorkerDied | None:
        """Why the process has ended, or None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            text = f"was killed by {known.get(-code, f'signal {-code}')}"
            return WorkerDied(f"{self.name} worker (pid {self.process.pid}) {text}")
        self.read_events(lambda name, text: None)
        reason = self.failure or self._last_log_line() or "without a word"
        text = f"{self.name} worker (pid {self.process.pid}) ended with code {code}: {reason}"
        return WorkerDied(text, exit_code=code or 1)

    def _last_log_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        os.close(self._events)


class LocalLauncher:
    """Owns the processes it started; a context manager that leaves none behind."""

    def __init__(self, log_dir: Path, on_step: OnStep) -> None:
        self._log_dir = log_dir
        self.on_step = on_step
        self._workers: list[WorkerProcess] = []
        self._grace_until_s = 0.0
        """Since when those that live were asked to end, and GRACE_S more."""

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Run `wrapper python -m module arguments`; returns at once. `wrapper` are the words of a
        command that executes what follows in its own place, as nsenter and env do; the
        `environment` is ours by default. Started again, it goes on in the same log."""
        again = any(worker.name == name for worker in self._workers)
        log = self._log_dir / f"{name}.log"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        # -P: what lies in the user's directory must not be taken for a module of ours.
        python = [*wrapper, sys.executable, "-P", "-m", module]
        command = [*python, *arguments, "--ready-fd", str(write_fd)]
        try:
            with log.open("ab" if again else "wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                    env=environment,
                )
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        worker = WorkerProcess(name, process, log, read_fd)
        for earlier in [one for one in self._workers if again and one.name == name]:
            self._remove(earlier)
        self._workers.append(worker)
        return worker

    def _remove(self, worker: WorkerProcess) -> None:
        """Of two processes of a name only the last is ours to watch: the first has ended."""
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait(KILLED_TIMEOUT_S)
        worker.close()
        self._workers.remove(worker)

    def wait_for(
        self, done: Callable[[], bool], timeout_s: float, what: str, pause_s: float = 0.02
    ) -> None:
        """Until `done()`; raises WorkerDied when one ends meanwhile, DeadlineExceeded when late."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.check()
            if done():
                return
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:g} s")
            time.sleep(pause_s)

    def check(self) -> None:
        """Raise WorkerDied if any has ended; take in what the others say."""
        for worker in self._workers:
            worker.read_events(self.on_step)
            ending = worker.ending()
            if ending is not None:
                raise ending

    def endings(self, timeout_s: float = OTHERS_TIMEOUT_S) -> list[WorkerDied]:
        """After one has died: wait for the others to notice, and return how each has ended."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if all(worker.process.poll() is not None for worker in self._workers):
                break
            time.sleep(0.05)
        found = (worker.ending() for worker in self._workers)
        return [ending for ending in found if ending is not None]

    def terminate(self) -> list[WorkerProcess]:
        """Ask those that live to end, and return them; `stop` waits for it, and counts its grace
        from the first time on."""
        self._grace_until_s = self._grace_until_s or time.monotonic() + GRACE_S
        alive = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in alive:
            worker.process.terminate()
        return alive

    def stop(self) -> None:
        """End all processes: SIGTERM, a grace, SIGKILL. Idempotent."""
        alive = self.terminate()
        for worker in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, self._grace_until_s - time.monotonic()))
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in alive:  # all of them die at the same time, not one after the other
            worker.process.wait(KILLED_TIMEOUT_S)
        self._grace_until_s = 0.0
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if alive:
            _clear_up()


def _clear_up() -> None:
    """A worker that was killed, or did not wait for its threads, could not do it itself."""
    from kvxfer.transfer.connector import clear_up_after_killed

    try:
        clear_up_after_killed()
    except KvxferError as error:
        logger.warning("%s", error)


def divide_budget(free_bytes: int, num_workers: int, most_bytes: int) -> int:
    """Each worker's share of the machine's memory: equal parts of what is free, less 8 % for all
    else that runs here (vLLM's 0.92 where the device is not the worker's alone)."""
    return min(most_bytes, int(free_bytes * 0.92) // num_workers)
