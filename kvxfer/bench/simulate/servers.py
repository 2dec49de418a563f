"""What takes time in the model: cores that processes share, and servers that take one at a time.

Facts relied on (SimPy 4.1, run): an event costs about 10 us, of which most is the queue's; a
process' step more. So a server with cores of its own has no events but those that somebody waits
for: first come, first served, and how long each takes is known when it comes, so its end is too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import simpy

LATE = 1e-12
"""Seconds below which a rest of work is none: rounding."""


class Cores:
    """So many cores, shared evenly by all that have work (processor sharing): each job runs at
    min(1, cores / jobs), as an operating system's fair scheduler has it.

    All run at the same speed, so who ends first is known: `_done` is the work that one which has
    always been here has got by now.
    """

    def __init__(self, env: simpy.Environment, num_cores: int, crowding: float = 0.0) -> None:
        """`crowding`: as `Costs` has it."""
        self._crowding = crowding
        self._env = env
        self._num_cores = num_cores
        self._jobs: list[tuple[float, int, simpy.Event]] = []
        self._order = count()
        self._done = 0.0
        self._since_s = env.now
        self._turn = 0
        self.busy_s = 0.0
        """Seconds of cores that were used."""

    def run(self, work_s: float) -> simpy.Event:
        """Happens when so much work was done."""
        self._advance()
        event = self._env.event()
        heapq.heappush(self._jobs, (self._done + work_s, next(self._order), event))
        self._plan()
        return event

    @property
    def _speed(self) -> float:
        if not self._jobs:
            return 0.0
        others = min(len(self._jobs), self._num_cores) - 1
        share = min(1.0, self._num_cores / len(self._jobs))
        return share / (1.0 + self._crowding * others)

    def _advance(self) -> None:
        passed_s = self._env.now - self._since_s
        self._done += passed_s * self._speed
        self.busy_s += passed_s * min(len(self._jobs), self._num_cores)
        self._since_s = self._env.now

    def _plan(self) -> None:
        """Come back when the next one ends, unless others come or go before."""
        self._turn += 1
        if self._jobs:
            left_s = max(0.0, self._jobs[0][0] - self._done) / self._speed
            wake = self._env.timeout(left_s, self._turn)
            wake.callbacks.append(self._end_some)

    def _end_some(self, wake: simpy.Event) -> None:
        if wake.value != self._turn:
            return
        self._advance()
        self._done = max(self._done, self._jobs[0][0])  # this one was waited for
        while self._jobs and self._jobs[0][0] <= self._done + LATE:
            heapq.heappop(self._jobs)[2].succeed()
        self._plan()


class Server:
    """A thread or a link: one job at a time, in the order in which they came."""

    def __init__(self, env: simpy.Environment, cores: Cores | None = None) -> None:
        """Without `cores` it has one of its own."""
        self._env = env
        self._cores = cores
        self._last: simpy.Event | None = None
        self.free_s = 0.0
        """With a core of its own: when it will have done all that came so far."""
        self.work_s = 0.0
        """Of all that came."""
        self.num_jobs = 0

    def serve(self, work_s: float) -> simpy.Event:
        """Happens when this is done."""
        if self._cores is None:
            return self._env.timeout(self.load(work_s) - self._env.now)
        self._count(work_s)
        self._last = self._env.process(self._run(self._last, work_s))
        return self._last

    def then(self, work_s: float, done: Callable[[float], None], after_s: float = 0.0) -> None:
        """Call `done` with the time at which it is done: at once where that is known. The job
        comes in `after_s` seconds."""
        if self._cores is None:
            done(self.load(work_s, self._env.now + after_s))
            return
        self._env.process(self._later(after_s, work_s, done))

    def load(self, work_s: float, at_s: float = 0.0) -> float:
        """With a core of its own: a job that nobody waits for, and that comes at `at_s`; when it is
        done. Who comes later is not held up by what is still to come, but for its work."""
        self._count(work_s)
        self.free_s = max(self._env.now, self.free_s) + work_s
        return max(self.free_s, at_s + work_s)

    def add(self, work_s: float) -> None:
        """A job that nobody waits for."""
        if self._cores is None:
            self.load(work_s)
        else:
            self.serve(work_s)

    def _count(self, work_s: float) -> None:
        self.work_s += work_s
        self.num_jobs += 1

    def _run(self, before: simpy.Event | None, work_s: float) -> simpy.events.ProcessGenerator:
        assert self._cores is not None
        if before is not None and not before.processed:
            yield before
        if work_s > 0:
            yield self._cores.run(work_s)

    def _later(
        self, after_s: float, work_s: float, done: Callable[[float], None]
    ) -> simpy.events.ProcessGenerator:
        if after_s > 0:
            yield self._env.timeout(after_s)
        yield self.serve(work_s)
        done(self._env.now)
