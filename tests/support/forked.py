"""Programs of ours run by a child that was forked, in the place of `python -m`: a process of its
own with its own descriptors, signals and exit code, but nothing to import.

What starts workers of its own (`kvxfer demo`, a worker of several ranks) starts them the same way,
as long as it has one thread: fork copies no other.
"""

from __future__ import annotations

import ctypes
import os
import random
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

PREPARED = (
    *("connectors.nixl", "connectors.peer", "connectors.staged", "decode.worker", "prefill.worker"),
    *("kvxfer.cli", "kvxfer.demo.run", "kvxfer.serve.complete", "kvxfer.worker.single"),
    *("kvxfer.model.attention", "transformers.models.llama.modeling_llama"),
)
"""What the fork server imports for all."""
STANDARD = (0, 1, 2)
PR_SET_NAME = 15


def name_of(module: str) -> bytes:
    """What such a process is called in /proc/PID/comm."""
    return f"kvxfer-{module.rpartition('.')[2]}".encode()[:15]


def run_command(module: str, arguments: Sequence[str]) -> int:
    """In the forked child: the exit code of `python -m MODULE ARGUMENTS…`, or of a script."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    ctypes.CDLL(None).prctl(PR_SET_NAME, name_of(module))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    random.seed()
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # a program is not what was imported before it
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        assert error.code is None or isinstance(error.code, int), error.code
        return error.code or 0
    return 0


class ForkingPopen(subprocess.Popen[Any]):
    """`python -P -m MODULE ARGUMENTS…` goes on in the child without an exec."""

    def __init__(self, args: Any, **options: Any) -> None:
        if list(args[:3]) == [sys.executable, "-P", "-m"] and has_one_thread():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            kept = {*STANDARD, *options.get("pass_fds", ())}
            options["preexec_fn"] = partial(_go_on, args[3], args[4:], kept)
        super().__init__(args, **options)


def has_one_thread() -> bool:
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _go_on(module: str, arguments: Sequence[str], kept: set[int]) -> None:
    """Never returns. Closes what exec would, so that the parent learns of the start."""
    code = 70
    try:
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(entry) not in kept:
                close_if_open(int(entry))
        code = run_command(module, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def close_if_open(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # the one that listed them
        return
