"""Work in a process of its own, so that its memory is clean and its end gives all of it back."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kvxfer.errors import DeadlineExceeded, KvxferError, WorkerDied

T = TypeVar("T")

LAST_WORDS_S = 10.0
"""How long a process that was told to end may take."""


def run_isolated(work: Callable[..., T], *arguments: object, timeout_s: float) -> T:
    """What `work(*arguments)` returns in a fresh process, whose output is ours.

    `work` is a module's function; arguments and result cross the process as pickles. Raises
    WorkerDied with the text of a KvxferError, or when it ends otherwise, and DeadlineExceeded.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        answer: T = _result(ours, process, timeout_s)
        return answer
    finally:
        ours.close()
        process.join(LAST_WORDS_S)
        if process.is_alive():
            process.kill()
            process.join(LAST_WORDS_S)


def _result(pipe: Connection, process: Any, timeout_s: float) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not pipe.poll(0.2):
        if time.monotonic() > deadline_s:
            process.kill()
            raise DeadlineExceeded(f"a measuring process did not end within {timeout_s:g} s")
    try:
        is_error, value = pipe.recv()
    except EOFError:
        process.join(LAST_WORDS_S)
        raise WorkerDied(f"a measuring process ended with code {process.exitcode}") from None
    if is_error:
        raise WorkerDied(f"a measuring process failed: {value}")
    return value


def _run(pipe: Connection, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """In the new process. What is no KvxferError ends it with a traceback."""
    try:
        pipe.send((False, work(*arguments)))
    except KvxferError as error:
        pipe.send((True, str(error)))
