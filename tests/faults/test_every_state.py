"""SIGKILL, SIGSTOP and restart of prefill, decode and router at every state, real processes all.

After each: no wrong token, no request without an end, blocks, descriptors and threads as before, no
crash, and a new request is served by processes of which nobody but the victim was started again.
All cases once, shared out to services that run at the same time; KVXFER_FAULT_ROUNDS asks for more
rounds, at other lanes each time, and also at the end of the turn in which the state was entered.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fault_cases import Case, all_cases, run_case, states
from support.fault_record import ROUNDS, FaultRecord
from support.fork_server import ForkServer
from support.service import Service
from support.violations import MoreHeld, kind_of

from kvxfer.bench.report import Figure

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow]

KINDS: tuple[dict[str, Any], ...] = (
    {"lane": "push", "connector": "nixl"},
    {"lane": "pull", "connector": "peer"},
    {"lane": "pull", "connector": "nixl"},
    {"lane": "push", "connector": "nixl", "environment": {"UCX_TLS": "tcp"}},
    {"lane": "auto", "connector": "nixl", "environment": {"UCX_TLS": "tcp"}},
    {"lane": "auto", "connector": "peer,nixl"},
)
SERVICES = KINDS * max(1, len(os.sched_getaffinity(0)) // 8)
"""At the same time: mostly they wait."""
NAME = "every state"


@dataclass(frozen=True)
class Result:
    case: Case
    service: str
    error: str
    kind: str
    """Of the error, by the names of `violations`."""
    ends: dict[str, int]
    took_s: float
    is_chance: bool = False
    """The error may be one of what was compared, not of what was done."""


class Campaign:
    """Each service in a thread of its own takes the next case until none is left.

    Where a process holds more than others did, the case is tried once more by another service,
    unless figures are recorded: UCX may have a socket more between two agents than between those
    that were counted first, and a leak of ours would be there again."""

    def __init__(self, server: ForkServer, is_recorded: bool) -> None:
        self._server = server
        self._is_recorded = is_recorded
        self._results: list[Result] = []

    def run(self, cases: list[Case], round_: int) -> list[Result]:
        """Which case meets which lane is chance in order, and another in each round."""
        shares: list[queue.SimpleQueue[Case]] = [queue.SimpleQueue() for _ in SERVICES]
        for index, case in enumerate(cases):
            shares[(index + index // len(SERVICES) + round_) % len(SERVICES)].put(case)
        threads = [
            threading.Thread(target=self._work, args=(kind, share))
            for kind, share in zip(SERVICES, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found, self._results = self._results, []
        return found

    def _work(self, kind: dict[str, Any], cases: queue.SimpleQueue[Case]) -> None:
        service: Service | None = None
        while not cases.empty():
            case = cases.get()
            service, result = self._try(service, kind, case)
            if result.is_chance and not self._is_recorded:
                print(f"seen once, tried again: {case} ({result.service}): {result.error}")
                service, result = self._try(service, kind, case)
            self._results.append(result)
        if service is not None:
            service.__exit__()

    def _try(
        self, service: Service | None, kind: dict[str, Any], case: Case
    ) -> tuple[Service | None, Result]:
        """What came of it, and the service, which goes on unless it failed."""
        began, error, kind_of_error, ends = time.monotonic(), "", "", {}
        is_chance = False
        try:
            if service is None:
                service = Service(self._server, **kind)
                service.__enter__()
            ends = run_case(service, case)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            kind_of_error, is_chance = kind_of(problem), isinstance(problem, MoreHeld)
            if service is not None:
                service.__exit__()
            service = None
        name = " ".join(map(str, kind.values()))
        took_s = time.monotonic() - began
        return service, Result(case, name, error, kind_of_error, ends, took_s, is_chance)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, fork_server: ForkServer, fault_record: FaultRecord
) -> Iterator[dict[str, list[Result]]]:
    """By state, of those that are to be tested.

    UCX unlinks its shared memory right after it has made it: who is killed in between leaves it.
    Such segments are counted, and removed; nothing else may be left.
    """
    wanted = [
        item.callspec.params["state"]  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path and "results" in getattr(item, "fixturenames", ())
    ]
    memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
    found: dict[str, list[Result]] = {state: [] for state in wanted}
    moments = ("entry",) if ROUNDS == 1 else ("entry", "turn")
    all_of = {state: [c for at in moments for c in all_cases(state, at)] for state in states()}
    fault_record.wanted[NAME] = ROUNDS * sum(map(len, all_of.values()))
    for round_ in range(ROUNDS):
        cases = [case for state in wanted for case in all_of[state]]
        is_recorded = request.config.getoption("--record") is not None
        for result in Campaign(fork_server, is_recorded).run(cases, round_):
            found[result.case.state].append(result)
            count(fault_record, result)
    reached = sum(any(not one.error for one in results) for results in found.values())
    fault_record.add(
        NAME,
        Figure(f"{NAME}: rounds", ROUNDS, "", 3.0, "higher", 1, 0.0),
        Figure(f"{NAME}: states reached", reached, "", len(states()), "higher", 1, 0.0),
    )
    left = set(os.listdir("/dev/shm")) - memory  # noqa: PTH208
    killed = {name for name in left if name.startswith("ucx_shm_posix_")}
    for name in killed:
        Path("/dev/shm", name).unlink(missing_ok=True)
    fault_record.add(
        NAME, Figure(f"{NAME}: segments that UCX left", len(killed), "", None, "lower", 1, 0.0)
    )
    yield found
    assert left == killed, "shared memory is left"


def count(record: FaultRecord, result: Result) -> None:
    tally = record.tally(NAME)
    tally["cases"] += 1
    tally[f"cases of: {result.case.fault}"] += 1
    tally["failed"] += bool(result.error)
    if result.error:
        tally[result.kind] += 1
    tally.update({f"requests ended in: {how}": number for how, number in result.ends.items()})


@pytest.mark.parametrize("state", states())
def test_faults_at(state: str, results: dict[str, list[Result]]) -> None:
    assert len(results[state]) >= len(all_cases(state))
    failed = [f"{one.case} ({one.service}): {one.error}" for one in results[state] if one.error]
    assert not failed, "\n\n".join(failed)
