"""Keeps worker processes of this host running: who dies is started again, the others stay.

| state    | what happens                                   | leaves by                            |
| ---      | ---                                            | ---                                  |
| STARTING | it loads, warms up, says what it does          | ready → READY; ends → WAITING, or,   |
|          |                                                | before all were ready, the end of us |
| READY    | it serves                                      | ends with 0 → LEFT, else → WAITING   |
| WAITING  | a pause, doubled with each failure, up to      | its time has come → STARTING         |
|          | PAUSE_MAX_S; STEADY_S in READY forgets them    |                                      |
| LEFT     | it was told to end, as by a drain: terminal    |                                      |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvxfer.errors import WorkerDied
from kvxfer.launch.local import LocalLauncher, WorkerProcess

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
STEADY_S = 60.0


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How a worker is started, each time."""

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    """Where it is dialled, with keys ADDRESS#NAME: the same after a restart, so that its peers find
    it again."""


def pause_s(num_failures: int) -> float:
    """Before it is started again, having failed so often in a row."""
    return float(min(PAUSE_MAX_S, PAUSE_S * 2 ** min(num_failures - 1, 16)))


class Kept(Protocol):
    """A worker through all its processes, for whoever tells of it."""

    @property
    def plan(self) -> WorkerPlan: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def pid(self) -> int: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def last_end(self) -> str: ...


class Keeper(Protocol):
    """Keeps workers running, here or elsewhere. One thread."""

    @property
    def workers(self) -> Sequence[Kept]: ...
    @property
    def was_ready(self) -> bool:
        """Whether all were ready at one time: from then on a death is no reason to give up."""

    def poll(self, now_s: float | None = None) -> None:
        """Never blocks. Raises KvxferError where what was asked for does not work."""


@dataclass
class Supervised:
    """A worker through all its processes."""

    plan: WorkerPlan
    process: WorkerProcess
    state: WorkerState = WorkerState.STARTING
    num_restarts: int = 0
    num_failures: int = 0
    """In a row."""
    last_end: str = ""
    due_s: float = 0.0
    """WAITING: when to start it again; READY: when its failures are forgotten."""

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def pause_s(self) -> float:
        return pause_s(self.num_failures)


@dataclass
class Supervisor:
    """Starts `plans` with a launcher, which stays its caller's. One thread; `poll` makes it move
    and never blocks."""

    launcher: LocalLauncher
    environment: Mapping[str, str] | None = None
    workers: list[Supervised] = field(default_factory=list)
    was_ready: bool = False
    """Whether all were ready at one time: from then on a death is no reason to give up."""

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        for plan in plans:
            self.workers.append(Supervised(plan, self._launch(plan)))

    def poll(self, now_s: float | None = None) -> None:
        """Take in what the workers say. Raises WorkerDied for one that ends before all of them
        were ready: what was asked for does not work."""
        now_s = time.monotonic() if now_s is None else now_s
        for worker in self.workers:
            match worker.state:
                case WorkerState.STARTING | WorkerState.READY:
                    self._look(worker, now_s)
                case WorkerState.WAITING if now_s >= worker.due_s:
                    worker.num_restarts += 1
                    worker.process, worker.state = self._launch(worker.plan), WorkerState.STARTING
                    logger.warning("%s: started again", worker.plan.name)
        if not self.was_ready:
            self.was_ready = all(one.state is WorkerState.READY for one in self.workers)

    def _launch(self, plan: WorkerPlan) -> WorkerProcess:
        return self.launcher.start(
            plan.name, plan.module, plan.arguments, environment=self.environment
        )

    def _look(self, worker: Supervised, now_s: float) -> None:
        worker.process.read_events(self.launcher.on_step)
        ending = worker.process.ending()
        if ending is not None:
            self._ended(worker, ending, now_s)
        elif worker.process.is_ready and worker.state is WorkerState.STARTING:
            worker.state, worker.due_s = WorkerState.READY, now_s + STEADY_S
            if self.was_ready:
                logger.warning("%s: ready again", worker.plan.name)
        elif worker.state is WorkerState.READY and now_s >= worker.due_s:
            worker.num_failures = 0

    def _ended(self, worker: Supervised, ending: WorkerDied, now_s: float) -> None:
        worker.last_end = str(ending)
        if not self.was_ready:
            raise ending
        if worker.process.process.returncode == 0:
            worker.state = WorkerState.LEFT
            logger.warning("%s: it was told to end, and did", worker.plan.name)
            return
        worker.num_failures += 1
        worker.state, worker.due_s = WorkerState.WAITING, now_s + worker.pause_s()
        logger.warning("%s; started again in %g s", ending, worker.pause_s())
