"""A thread that does one job after another and reports to the control thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvxfer.errors import KvxferError, WorkerDied
from kvxfer.worker.jobs import Jobs
from kvxfer.worker.mailbox import Mailbox

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[], None]
"""Runs in the control thread."""


@dataclass(frozen=True, slots=True)
class Job:
    run: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[KvxferError], None]


class _End:
    """After the last job."""


class WorkThread:
    """Jobs run here, in order; what they return or raise is handled in the control thread.

    A KvxferError is the job's own failure. Anything else is a bug: it ends the process, through
    the control thread, with a clear last line.
    """

    def __init__(
        self, name: str, reports: Mailbox[Report], begin: Callable[[], None] = lambda: None
    ) -> None:
        """`begin` runs first, in the thread."""
        self._reports = reports
        self._begin = begin
        self._jobs: Jobs[Job | _End] = Jobs()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        run: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        self._jobs.put(Job(run, done, failed))

    def stop(self, timeout_s: float) -> bool:
        """Let the jobs before this one end; False if they did not within `timeout_s`."""
        self._jobs.put(_End())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def report(self, call: Report) -> None:
        self._reports.put(call)

    def idle(self) -> float | None:
        """Called between jobs; returns for how long to wait for the next (None: for ever)."""
        return None

    def _main(self) -> None:
        try:
            self._begin()
            while True:
                job = self._jobs.take(self.idle())
                if isinstance(job, _End):
                    return
                if job is not None:
                    self._execute(job)
        except WorkerDied as error:  # told already, in one line
            self._reports.put(partial(_raise, error))
        except Exception as error:
            logger.exception("thread %s died", self._thread.name)
            reason = f"thread {self._thread.name} died: {type(error).__name__}: {error}"
            self._reports.put(lambda: _raise(WorkerDied(reason)))

    def _execute(self, job: Job) -> None:
        try:
            result = job.run()
        except KvxferError as error:
            # Not a local of this frame: with the traceback that would be a cycle, which keeps
            # what the job touched (an agent, say) from ending when it is dropped.
            self._reports.put(partial(job.failed, error))
        else:
            self._reports.put(lambda: job.done(result))


def _raise(error: KvxferError) -> None:
    raise error
