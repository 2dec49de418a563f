"""Faults at every state: which there are, how each state is reached, and what must hold after."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import decode.lane_trials
import decode.schedule
import prefill.schedule
from kvxfer.control import session
from kvxfer.worker import residency
from support.service import PEER_TIMEOUT_S, ROLES, Asked, Service, check_ended, until
from support.state_hooks import Order

SHORT_S = 0.2
"""Well within the peer's deadline, which is 0.7 s."""
LONG_S = PEER_TIMEOUT_S + 0.5
FIRE_TIMEOUT_S = 6.0
FAULTS = ("kill", "restart", "stop, and go on in time", "stop, and go on too late")

TABLES: dict[type[Enum], ModuleType] = {
    decode.schedule.RequestState: decode.schedule,
    prefill.schedule.JobState: prefill.schedule,
    session.PeerState: session,
}


def table(module: ModuleType) -> list[str]:
    """The states that a module's docstring draws."""
    return re.findall(r"^\| ([A-Z_]+) +\|", module.__doc__ or "", re.MULTILINE)


def states() -> list[str]:
    """All of them, by the names that `state_hooks` gives them."""
    found = []
    for kind, owners in (
        (decode.schedule.RequestState, ("",)),
        (prefill.schedule.JobState, ("",)),
        (session.PeerState, ("prefill:", "decode:")),
    ):
        names = [f"{kind.__name__}.{state.name}" for state in kind]
        found += [f"{owner}{name}" for owner in owners for name in names]
    return found + [f"LaneTrials.{step}" for step in table(decode.lane_trials)]


@dataclass(frozen=True)
class Case:
    state: str
    victim: str
    fault: str
    at: str = "entry"

    @property
    def owner(self) -> str:
        """Whose state it is."""
        role, _, rest = self.state.rpartition(":")
        return role or ("prefill" if rest.startswith("JobState") else "decode")

    @property
    def number(self) -> signal.Signals:
        numbers = {"kill": signal.SIGKILL, "restart": signal.SIGTERM}
        return numbers.get(self.fault, signal.SIGSTOP)

    def __str__(self) -> str:
        return f"{self.state}, {self.at}: {self.fault} {self.victim}"


def all_cases(state: str, at: str = "entry") -> list[Case]:
    return [Case(state, victim, fault, at) for victim in ROLES for fault in FAULTS]


def run_case(service: Service, case: Case) -> dict[str, int]:
    """Reach the state, do the fault there, and check; how the requests ended, counted."""
    victim = service[case.victim]
    Order(case.state, victim.pid, case.number, at=case.at).place(service.order_path(case.owner))
    asked = _provoke(service, case)
    until(lambda: _listen_until_fired(service, case), FIRE_TIMEOUT_S, f"{case}: reached")
    _follow_up(service, case)
    for one in asked:
        if not one.reason and "ABORTING" not in case.state and one.max_new_tokens > 100:
            service.cancel(one)
    found = service.collect()
    service.recover()
    service.check_idle()
    return check_ended(found)


def _listen_until_fired(service: Service, case: Case) -> bool:
    service.listen(0.001)
    return service.has_fired(case.owner)


def _provoke(service: Service, case: Case) -> list[Asked]:
    """What leads to the state."""
    if "PeerState" in case.state or "LaneTrials" in case.state:
        asked = [service.ask() for _ in range(3)]
        other = "prefill" if case.owner == "decode" else "decode"
        _restart(service, other)
        return asked
    asked = [service.ask(num_tokens) for num_tokens in (20, 40, 28)]
    if case.state in ("RequestState.ABORTING", "JobState.ENDING"):
        service.listen(0.01)
        for one in asked:
            service.cancel(one)
    return asked


def _restart(service: Service, role: str) -> None:
    """Without waiting: the fault may hit it while it starts."""
    service.finish(role, signal.SIGKILL)
    service[role].start()


def _follow_up(service: Service, case: Case) -> None:
    if case.fault in ("kill", "restart"):
        code = service.finish(case.victim, case.number)
        # a router has no way to end but a signal; a worker that is told to leave says goodbye
        expected = 0 if case.fault == "restart" and case.victim != "router" else -case.number
        assert code == expected, f"{case}: ended with {code}\n{service.tails()}"
        service[case.victim].start()
        return
    pause = SHORT_S if case.fault == FAULTS[2] else LONG_S
    service.listen(pause)
    service[case.victim].send(signal.SIGCONT)
    time.sleep(0)
