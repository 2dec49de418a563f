"""Keeps as many workers running on a cluster as are wanted: who dies is started again, on another
node if need be, and there may be more or fewer of them at any time.

| state    | what happens                                   | leaves by                            |
| ---      | ---                                            | ---                                  |
| STARTING | room is made for it, then it loads, warms up   | ready → READY; ends → WAITING, or,   |
|          |                                                | before all were ready, the end of us |
| READY    | routers know it, and it serves                 | ends with 0, or as it was to leave → |
|          |                                                | gone; else, or its node is → WAITING |
| WAITING  | a pause, as of `kvxfer.launch.supervisor`      | its time has come → STARTING         |

Room is reserved in groups: one for all that are started together. A bundle whose worker left is
used by the next worker that wants the same, and a group goes back once all of its workers left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from kvxfer.errors import DeadlineExceeded, KvxferError, UsageError, WorkerDied
from kvxfer.launch.local import OnStep
from kvxfer.launch.ray_logs import CollectedLog
from kvxfer.launch.ray_seam import Cluster, Host, Look
from kvxfer.launch.ray_workers import Members, RayWorker, Recipe, Room
from kvxfer.launch.supervisor import STEADY_S, WorkerPlan, WorkerState, pause_s

logger = logging.getLogger(__name__)

MOST_WORKERS = 1024
"""Of each role; more is a slip of the finger."""


class RayFleet:
    """One thread; `poll` makes it move and never blocks. The cluster stays its owner's."""

    def __init__(self, cluster: Cluster, members: Members, recipe: Recipe, on_step: OnStep) -> None:
        self.workers: list[RayWorker] = []
        self.was_ready = False
        self._cluster = cluster
        self._members = members
        self._recipe = recipe
        self._on_step = on_step
        self._rooms: list[Room] = []
        self._counts: dict[str, int] = dict.fromkeys(recipe.bundles, 0)
        """How many there ever were: no name is used twice."""

    # --- how many there are -------------------------------------------------------------------

    def scale(self, asked: Mapping[str, int]) -> dict[str, int]:
        """Have so many of each role named; at once. Returns how many of all roles there are to be.
        Raises UsageError, and changes nothing then."""
        for role, count in asked.items():
            if not 1 <= count <= MOST_WORKERS:
                raise UsageError(role, count, f"must be between 1 and {MOST_WORKERS}")
        wanted = {role: len(self._staying(role)) for role in self._recipe.bundles} | dict(asked)
        more: list[str] = []
        for role, count in wanted.items():
            # Those go first that serve nobody yet, then those that came last.
            newest = self._staying(role)[::-1]
            newest.sort(key=lambda one: one.state is WorkerState.READY)
            more += [role] * (count - len(newest))
            for worker in newest[: max(0, len(newest) - count)]:
                self._let_go(worker)
        self._add(more)
        return wanted

    def _staying(self, role: str) -> list[RayWorker]:
        return [one for one in self.workers if one.plan.module == role and not one.is_leaving]

    def _let_go(self, worker: RayWorker) -> None:
        worker.is_leaving = True
        worker.due_s = time.monotonic() + self._recipe.drain_timeout_s
        if worker.state is WorkerState.READY:
            self._members.drain(worker.address)
        else:
            self._forget(worker, "it is not wanted any more")

    def _add(self, roles: Sequence[str]) -> None:
        """In free bundles first; room for the others is reserved together."""
        wanting: list[str] = []
        for role in roles:
            bundle = self._recipe.bundles[role]
            free = (
                (room, index)
                for room in self._rooms
                for index, one in enumerate(room.bundles)
                if index not in room.used and one == bundle
            )
            place = next(free, None)
            if place is None:
                wanting.append(role)
            else:
                self._make(role, *place)
        if not wanting:
            return
        bundles = tuple(self._recipe.bundles[role] for role in wanting)
        late_s = time.monotonic() + self._recipe.placement_timeout_s
        room = Room(self._cluster.reserve(bundles), bundles, late_s)
        self._rooms.append(room)
        for index, role in enumerate(wanting):
            self._make(role, room, index)

    def _make(self, role: str, room: Room, index: int) -> None:
        order = self._recipe.order(role, self._counts[role])
        self._counts[role] += 1
        plan = WorkerPlan(order.name, role, order.arguments, "")
        log = CollectedLog(self._recipe.log_dir / f"{order.name}.log", is_json=self._recipe.is_json)
        worker = RayWorker(plan, order, room, index, log)
        room.used.add(index)
        self.workers.append(worker)
        if room.is_placed:
            self._start(worker)
        else:
            self._on_step(order.name, "waiting for room on the cluster")

    def _start(self, worker: RayWorker) -> None:
        worker.state = WorkerState.STARTING
        group = worker.room.group
        worker.host = group.start(worker.index, worker.order, worker.num_restarts)

    def _forget(self, worker: RayWorker, why: str) -> None:
        """It is none of ours any more, and its room is free."""
        logger.info("%s: has left: %s", worker.plan.name, why)
        self._end_life(worker)
        self.workers.remove(worker)
        room = worker.room
        room.used.discard(worker.index)
        if not room.used:
            self._rooms.remove(room)
            room.group.release()

    def _end_life(self, worker: RayWorker) -> None:
        if worker.address:
            self._members.leave(worker.address)
        if worker.host is not None:
            worker.host.stop()
        worker.address, worker.host, worker.pid = "", None, 0

    # --- what becomes of them -----------------------------------------------------------------

    def poll(self, now_s: float | None = None) -> None:
        """Raises KvxferError for what fails before all were ready: what was asked for does not
        work. Later on only a cluster that is gone does so."""
        now_s = time.monotonic() if now_s is None else now_s
        self._cluster.check()
        for room in list(self._rooms):
            self._look_for_room(room, now_s)
        for worker in list(self.workers):
            if worker.is_leaving and now_s >= worker.due_s:
                self._forget(worker, "it took too long to finish, and was ended")
            elif worker.state is WorkerState.WAITING:
                if now_s >= worker.due_s:
                    worker.num_restarts += 1
                    logger.warning("%s: started again", worker.plan.name)
                    self._start(worker)
            elif worker.host is not None:
                self._look(worker, worker.host, now_s)
        if not self.was_ready and self.workers:
            self.was_ready = all(one.state is WorkerState.READY for one in self.workers)

    def terminate(self) -> None:
        """The end has begun; the cluster's `close` waits for it."""
        for worker in self.workers:
            if worker.host is not None:
                worker.host.stop()

    def collect(self) -> None:
        """What logs came since the last `poll`, as at the end."""
        for worker in self.workers:
            for look in worker.host.take() if worker.host is not None else ():
                _write(worker, look)

    def _look_for_room(self, room: Room, now_s: float) -> None:
        if room.is_placed:
            return
        mine = [one for one in self.workers if one.room is room]
        if room.group.is_placed:
            room.is_placed = True
            for worker in mine:
                self._start(worker)
        elif now_s >= room.late_s:
            timeout_s = self._recipe.placement_timeout_s
            text = f"no room within {timeout_s:g} s (placement_timeout_s): {room.group.lacking}"
            if not self.was_ready:
                raise DeadlineExceeded(text)
            logger.error("%s", text)
            for worker in mine:
                self._forget(worker, "there is no room for it")

    def _look(self, worker: RayWorker, host: Host, now_s: float) -> None:
        for look in host.take():
            worker.pid = look.pid
            _write(worker, look)
            for step in look.steps:
                self._on_step(worker.plan.name, step)
            if look.ending:
                self._ended(worker, look.ending, look, now_s)
                return
            if look.is_ready and worker.state is WorkerState.STARTING:
                self._ready(worker, look, now_s)
        if worker.host is not None and host.lost:
            why = f"{worker.plan.name}: {host.lost}"
            if host.is_faulty and not self.was_ready:
                raise WorkerDied(why)
            self._ended(worker, why, None, now_s)
        elif worker.state is WorkerState.READY and not worker.is_leaving and now_s >= worker.due_s:
            worker.num_failures = 0

    def _ready(self, worker: RayWorker, look: Look, now_s: float) -> None:
        try:
            self._members.join(look.address, worker.plan.module)
        except KvxferError as error:
            self._ended(worker, f"{worker.plan.name}: {error}", look, now_s)
            return
        worker.state, worker.address = WorkerState.READY, look.address
        worker.due_s = now_s + STEADY_S
        logger.info("%s: ready on %s (pid %d)", worker.plan.name, look.ip, look.pid)

    def _ended(self, worker: RayWorker, why: str, look: Look | None, now_s: float) -> None:
        """`look` is the last one of a process that ended; None where its node or its host did."""
        worker.last_end = why
        if not self.was_ready and look is not None and not worker.is_leaving:
            raise WorkerDied(why, exit_code=look.exit_code if look.exit_code > 0 else 1)
        if worker.is_leaving or (look is not None and look.ending and look.exit_code == 0):
            self._forget(worker, why)
            return
        self._end_life(worker)
        worker.num_failures += 1
        pause = pause_s(worker.num_failures)
        worker.state, worker.due_s = WorkerState.WAITING, now_s + pause
        logger.warning("%s; started again in %g s", why, pause)


def _write(worker: RayWorker, look: Look) -> None:
    try:
        worker.log.write(look)
    except OSError as error:  # a full disk is no reason to serve nobody
        logger.error("%s: its log cannot be written: %s", worker.plan.name, error)
