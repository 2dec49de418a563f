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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.fault_cases import Case, all_cases, run_case, states
from support.fork_server import ForkServer
from support.service import Service

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow]

KINDS: tuple[dict[str, Any], ...] = (
    {"lane": "push", "connector": "nixl"},
    {"lane": "pull", "connector": "peer"},
    {"lane": "pull", "connector": "nixl"},
    {"lane": "push", "connector": "nixl", "environment": {"UCX_TLS": "tcp"}},
    {"lane": "pull", "connector": "nixl", "environment": {"UCX_TLS": "tcp"}},
    {"lane": "auto", "connector": "peer,nixl"},
)
ROUNDS = int(os.environ.get("KVXFER_FAULT_ROUNDS", "1"))


@dataclass(frozen=True)
class Result:
    case: Case
    service: str
    error: str
    ends: dict[str, int]
    took_s: float


class Campaign:
    """Each service in a thread of its own takes the next case until none is left."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._results: list[Result] = []

    def run(self, cases: list[Case], round_: int) -> list[Result]:
        """Which case meets which lane is chance in order, and another in each round."""
        shares: list[queue.SimpleQueue[Case]] = [queue.SimpleQueue() for _ in KINDS]
        for index, case in enumerate(cases):
            shares[(index + index // len(KINDS) + round_) % len(KINDS)].put(case)
        threads = [
            threading.Thread(target=self._work, args=(kind, share))
            for kind, share in zip(KINDS, shares, strict=True)
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
            case, began = cases.get(), time.monotonic()
            error, ends = "", {}
            try:
                if service is None:
                    service = Service(self._server, **kind)
                    service.__enter__()
                ends = run_case(service, case)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
                if service is not None:
                    service.__exit__()
                service = None
            name = " ".join(map(str, kind.values()))
            self._results.append(Result(case, name, error, ends, time.monotonic() - began))
        if service is not None:
            service.__exit__()


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, fork_server: ForkServer, counts: dict[str, Counter[str]]
) -> Iterator[dict[str, list[Result]]]:
    """By state, of those that are to be tested."""
    wanted = [
        item.callspec.params["state"]  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path and "results" in getattr(item, "fixturenames", ())
    ]
    memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
    found: dict[str, list[Result]] = {state: [] for state in wanted}
    tally = counts.setdefault("faults at every state", Counter())
    for round_ in range(ROUNDS):
        moments = ("entry",) if ROUNDS == 1 else ("entry", "turn")
        cases = [case for state in wanted for at in moments for case in all_cases(state, at)]
        for result in Campaign(fork_server).run(cases, round_):
            found[result.case.state].append(result)
            tally["cases"] += 1
            tally[result.case.fault] += 1
            tally["failed"] += bool(result.error)
            tally.update({f"requests {how}": number for how, number in result.ends.items()})
    assert set(os.listdir("/dev/shm")) <= memory, "shared memory is left"  # noqa: PTH208
    yield found


@pytest.mark.parametrize("state", states())
def test_faults_at(state: str, results: dict[str, list[Result]]) -> None:
    assert len(results[state]) >= len(all_cases(state))
    failed = [f"{one.case} ({one.service}): {one.error}" for one in results[state] if one.error]
    assert not failed, "\n\n".join(failed)
