"""A worker's engine with its threads, and a control thread that does what a bench wants.

As in a worker the three share one interpreter: the control thread plans and submits, the transfer
thread owns the connector, the model thread computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NoReturn, TypeVar

from kvxfer.bench.scratch import use_device
from kvxfer.config import WorkerOptions
from kvxfer.errors import DeadlineExceeded, KvxferError, WorkerDied
from kvxfer.transfer.connector import Direction, load_connectors
from kvxfer.transfer.regions import RegionSet
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.heap import freeze_heap
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.rank_transfer import Growth
from kvxfer.worker.transfer_thread import TransferThread
from kvxfer.worker.work_thread import Report, WorkThread

T = TypeVar("T")

JOB_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0
LONGEST_WAIT_S = 0.05


class EngineHost:
    """Control thread only. All of the cache that the engine begins with is committed and
    registered."""

    def __init__(
        self, options: WorkerOptions, initiates: Direction, pipe: Connection, undo: ExitStack
    ) -> None:
        """`options` resolved, their device too; `pipe` the parent's, which says nothing while this
        works; `undo` gives everything back, also after a failure."""
        use_device(options.device)
        self._pipe = pipe
        self._undo = undo
        connectors = load_connectors(options.connector)
        self.engine: Engine = start_engine(
            options, connectors, "bench", self.say, initiates=initiates
        )
        undo.callback(self.engine.close)
        undo.callback(self.engine.connector.close)
        self._reports: Mailbox[Report] = Mailbox()
        undo.callback(self._reports.close)
        enter = self.engine.enter_thread
        self.transfer = TransferThread(self.engine.transfer, self._reports, enter)
        self.model = WorkThread("model", self._reports, enter)
        undo.callback(self._stop)
        self.transfer.start()
        self.model.start()
        growth: Growth = self.result_of(partial(self.transfer.grow, self.engine.initial_blocks))
        (self.description,) = growth.descriptions
        self.regions = RegionSet(tuple(sorted(growth.regions)), 1)
        freeze_heap()

    @property
    def num_blocks(self) -> int:
        """Committed, of the first group, the null block included."""
        return self.engine.cache.committed_blocks[0]

    def turn(self, wait_s: float) -> None:
        """Wait for up to `wait_s` and do what the threads report. Raises WorkerDied when the parent
        has gone."""
        ready = wait([self._pipe, self._reports.fileno()], max(0.0, min(wait_s, LONGEST_WAIT_S)))
        if self._pipe in ready:
            raise WorkerDied("the bench stopped")
        for report in self._reports.drain():
            report()

    def until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            self.turn(LONGEST_WAIT_S)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:g} s")

    def result_of(
        self, begin: Callable[[Callable[[T], None], Callable[[KvxferError], None]], None]
    ) -> T:
        """What `begin`, given (done, failed), tells the first of; raises what it tells the
        second."""
        answers: list[T] = []
        begin(answers.append, fail)
        self.until(lambda: bool(answers), JOB_TIMEOUT_S, "a job of a thread")
        return answers[0]

    def in_model(self, run: Callable[[], T]) -> T:
        """What `run` returns, in the model thread, once the device has done all of it."""
        job = partial(self.engine.on_device, run)

        def begin(done: Callable[[T], None], failed: Callable[[KvxferError], None]) -> None:
            self.model.submit(job, done, failed)

        return self.result_of(begin)

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def _stop(self) -> None:
        """End the threads; memory that one may still touch ends with the process."""
        self.transfer.close_connector()
        stopped = [thread.stop(STOP_TIMEOUT_S) for thread in (self.model, self.transfer)]
        if not (all(stopped) and self.transfer.is_closed):
            self._undo.pop_all()


def fail(error: KvxferError) -> NoReturn:
    """What a job's failure comes to where nothing can be done about it."""
    raise error
