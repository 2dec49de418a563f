"""The load of `kvxfer bench control`, inside the decode worker's process: prompts that come with
what the channel brings, and answers that end there. So two processes are all there is.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvxfer.bench.thread_times import thread_times
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel, Letter
from kvxfer.control.messages import Message
from kvxfer.control.router_messages import Finished, Generate, Sampling
from kvxfer.errors import ControlError

LOAD = "in:load"
"""The peer that prompts come from."""
PROMPT_TOKENS = 16


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the load is."""

    found: Annotated[Path, Parameter(show=False)]
    """Where the figures go, as JSON, once they are complete."""
    prefill_pid: Annotated[int, Parameter(show=False)]
    """Process id of the prefill worker, whose CPU time is looked at."""
    rounds: int = 9
    """Each measures one after the other, then many at once."""
    alone: int = 300
    """Hand-overs of a round, one after the other."""
    together: int = 3000
    """Hand-overs of a round, many at once."""
    outstanding: int = 32
    """How many those are."""


class CPUTimes:
    """What both processes have spent since it was made."""

    def __init__(self, prefill_pid: int) -> None:
        self._pids = {"prefill": prefill_pid, "decode": os.getpid()}
        self._before = {worker: thread_times(pid) for worker, pid in self._pids.items()}

    def each_us(self, count: int) -> Iterator[tuple[str, str, float]]:
        """(worker, kind of thread, microseconds for each of `count` hand-overs)."""
        for worker, pid in self._pids.items():
            before = self._before[worker]
            for kind, now_ns in thread_times(pid).items():
                yield worker, kind, (now_ns - before[kind]) / 1e3 / count


class LoadChannel(Channel):
    """A worker's channel that also delivers the load. Its time runs from the turn that takes a
    prompt in to the word that it is finished, which for one token follows `Done` at once."""

    def __init__(self, identity: str, listen: str, keys: Keys | None, options: LoadOptions) -> None:
        super().__init__(identity, listen, keys)
        self._options = options
        self._found: dict[str, list[float]] = defaultdict(list)
        """Figures, round by round."""
        self._due: list[str] = []
        self._names = map(str, itertools.count())
        self._accepted_s: dict[str, float] = {}
        self._took_s: list[float] = []
        self._started_s = 0.0
        self._left = 0
        self._is_alone = True
        self._begin(options.alone, 1)  # warms up; its figures are dropped

    def _begin(self, count: int, outstanding: int) -> None:
        self._left, self._took_s = count, []
        self._cpu = CPUTimes(self._options.prefill_pid)
        self._started_s = time.perf_counter()
        for _ in range(min(outstanding, count)):
            self._next()

    def _next(self) -> None:
        if self._left > 0:
            self._left -= 1
            self._due.append(next(self._names))

    def poll(self, timeout_s: float) -> list[Letter]:
        letters = super().poll(0.0 if self._due else timeout_s)
        due, self._due = self._due, []
        for name in due:
            self._accepted_s[name] = time.perf_counter()
            tokens = [int(name) % 997 + 1] * PROMPT_TOKENS
            prompt = Generate(name, tokens, 1, Sampling(), [], "", False)
            letters.append(Letter(LOAD, prompt))
        return letters

    def send(self, peer: str, message: Message) -> None:
        if peer != LOAD:
            super().send(peer, message)
        elif isinstance(message, Finished):
            if message.error:
                raise ControlError(f"request {message.request_id}: {message.error}")
            self._took_s.append(time.perf_counter() - self._accepted_s.pop(message.request_id))
            self._next()
            if not self._left and not self._accepted_s and not self._due:
                self._end_round()

    def _end_round(self) -> None:
        took_s, options = time.perf_counter() - self._started_s, self._options
        count, found = len(self._took_s), self._found
        phase = "alone" if self._is_alone else "together"
        for worker, kind, cpu_us in self._cpu.each_us(count):
            found[f"{phase} {worker} {kind}"].append(cpu_us)
        if self._is_alone:
            cuts = statistics.quantiles(self._took_s, n=100)
            found["p50_ms"].append(cuts[49] * 1e3)
            found["p99_ms"].append(cuts[98] * 1e3)
        else:
            found["per_s"].append(count / took_s)
        if len(found["per_s"]) > options.rounds:
            self._write()
            return
        self._is_alone = not self._is_alone
        if self._is_alone:
            self._begin(options.alone, 1)
        else:
            self._begin(options.together, options.outstanding)

    def _write(self) -> None:
        """All but the first round of each."""
        figures = {name: values[1:] for name, values in self._found.items()}
        partial = self._options.found.with_suffix(".part")
        partial.write_text(json.dumps(figures))
        partial.rename(self._options.found)
