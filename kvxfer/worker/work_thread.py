"""A thread that does one job after another and reports to the control thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvxfer.errors import KvxferError, WorkerDied
from kvxfer.memory.steps import Steps
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
        self._long: deque[tuple[Steps[Any], Job]] = deque()
        """Begun, or next to begin, one after the other; each turn takes a step of the first."""
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

    def submit_steps(
        self,
        steps: Callable[[], Steps[T]],
        done: Callable[[T], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """As `submit`, for what takes long: jobs that come later have their turns between its
        steps. What is not at its end when the thread is to stop fails."""

        def begin() -> None:
            self._long.append((steps(), Job(begin, done, failed)))

        self.submit(begin, _ignore, failed)

    def stop(self, timeout_s: float) -> bool:
        """Let the jobs before this one end, but give up what has steps left; False if that took
        longer than `timeout_s`."""
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
                wait_s = self.idle()
                job = self._jobs.take(0 if self._long else wait_s)
                if isinstance(job, _End):
                    self._give_up()
                    return
                if job is not None:
                    self._execute(job)
                if self._long:
                    self._step()
        except WorkerDied as error:  # told already, in one line
            self._reports.put(partial(_raise, error))
        except Exception as error:
            logger.exception("thread %s died", self._thread.name)
            reason = f"thread {self._thread.name} died: {type(error).__name__}: {error}"
            self._reports.put(lambda: _raise(WorkerDied(reason)))

    def _step(self) -> None:
        steps, job = self._long[0]
        try:
            next(steps)
        except StopIteration as end:
            self._long.popleft()
            self._reports.put(partial(job.done, end.value))
        except KvxferError as error:
            self._long.popleft()
            self._reports.put(partial(job.failed, error))

    def _give_up(self) -> None:
        while self._long:
            steps, job = self._long.popleft()
            steps.close()
            self._reports.put(partial(job.failed, KvxferError("given up: the worker ends")))

    def _execute(self, job: Job) -> None:
        try:
            result = job.run()
        except KvxferError as error:
            # Not a local of this frame: with the traceback that would be a cycle, which keeps
            # what the job touched (an agent, say) from ending when it is dropped.
            self._reports.put(partial(job.failed, error))
        else:
            self._reports.put(lambda: job.done(result))


def _ignore(_: object) -> None: ...


def _raise(error: KvxferError) -> None:
    raise error
