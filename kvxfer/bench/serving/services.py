"""The services that a bench starts: P/D, which is `kvxfer serve`, and a single process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.serving.options import ServingOptions
from kvxfer.errors import DeadlineExceeded, WorkerDied
from kvxfer.launch.local import LocalLauncher

CHILD = "kvxfer.bench.serving.child"
WORKER, FRONT = "kvxfer.bench.serving.colocated", "kvxfer.bench.serving.single_front"
END_TIMEOUT_S = 10.0
"""After SIGINT; then SIGKILL, which its workers do not outlive."""
PD, SINGLE, GIVEN = "P/D", "single", "service"
"""Names of those that may be measured."""

Say = Callable[[str], None]
"""Told what is being done."""


@dataclass(frozen=True, slots=True)
class Service:
    """One that answers."""

    name: str
    url: str
    traces: tuple[Path, ...] = ()
    """Of its workers, as far as they write any."""
    pid: int = 0
    """Of the process that answers, where it was started here."""


@contextmanager
def given(options: ServingOptions) -> Iterator[Service]:
    yield Service(GIVEN, options.base_url.rstrip("/").removesuffix("/v1"))


@contextmanager
def start_pd(options: ServingOptions, directory: Path, say: Say) -> Iterator[Service]:
    """`kvxfer serve` in `directory`, which has its logs and traces, ended with the context. Raises
    WorkerDied, DeadlineExceeded."""
    words = options.worker_words()
    traces = {role: directory / f"{role}.trace.jsonl" for role in ("prefill", "decode")}
    for path in traces.values():
        path.unlink(missing_ok=True)
    if not any(word.split("=")[0] in ("--config", "--trace") for word in words):
        file = directory / "kvxfer.toml"
        tables = (f"[{role}]\ntrace = {json.dumps(str(path))}\n" for role, path in traces.items())
        file.write_text("".join(tables))
        words = ["--config", str(file), *words]
    if options.compare_single:
        words = [*words, "--no-enable-prefix-caching"]  # a single process has no such cache
    command = [
        *(sys.executable, "-P", "-m", CHILD, "--model", str(Path(options.model).resolve())),
        *("--prefill", str(options.prefill), "--decode", str(options.decode)),
        *("--threads", str(options.threads), "--port", "0", "--log-dir", str(directory), *words),
    ]
    out, err = directory / "serve.out", directory / "serve.log"
    with tempfile.TemporaryDirectory(prefix="kvxfer-serving-") as own:  # one that is killed, too
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err,
                start_new_session=True, env={**os.environ, "TMPDIR": own},
            )  # fmt: skip
        try:
            url = _ready_url(process, out, err, options.start_timeout_s, say)
            yield Service(PD, url, tuple(traces.values()), process.pid)
        finally:
            _end(process)


def _ready_url(
    process: subprocess.Popen[bytes], out: Path, err: Path, timeout_s: float, say: Say
) -> str:
    deadline_s, told = time.monotonic() + timeout_s, 0
    while True:
        steps = err.read_text(errors="replace").splitlines()
        for step in steps[told:]:
            say(step)
        told = len(steps)
        words = out.read_text(errors="replace").split()
        if words[:1] == ["ready:"] and len(words) > 2:
            return words[1]
        if process.poll() is not None:
            last = next((line for line in reversed(steps) if line.strip()), "without a word")
            text = f"kvxfer serve ended with code {process.returncode}: {last}"
            raise WorkerDied(text, process.returncode if process.returncode > 0 else 1)
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"kvxfer serve: not ready within {timeout_s:g} s")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
    process.wait(END_TIMEOUT_S)


@contextmanager
def start_single(
    options: ServingOptions, directory: Path, say: Say, threads: int
) -> Iterator[Service]:
    """One process with so many threads, behind the same HTTP front; as `start_pd`."""
    model = ("--model", str(Path(options.model).resolve()))
    words = (*model, "--threads", str(threads), *options.worker_words())
    timeout_s = options.start_timeout_s
    with LocalLauncher(directory, lambda name, text: say(f"{name}: {text}")) as launcher:
        worker = launcher.start("single", WORKER, ("--worker-id", "single", *words))
        launcher.wait_for(lambda: worker.is_ready, timeout_s, "start of the single process")
        front = launcher.start("single-front", FRONT, (*model, "--worker", worker.address))
        launcher.wait_for(lambda: bool(front.address), timeout_s, "its HTTP front's address")
        yield Service(SINGLE, f"http://{front.address}")
