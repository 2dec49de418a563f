"""Faults at every state: which there are, how each state is reached, and what must hold after."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

from support.service import PEER_TIMEOUT_S, ROLES, Service, check_ended, until
from support.state_hooks import Order

import decode.lane_trials
import decode.schedule
import prefill.schedule
from kvxfer.control import session

SHORT_S = 0.2
"""Well within the peer's deadline, which is 1 s."""
LONG_S = PEER_TIMEOUT_S + 0.4
FIRE_TIMEOUT_S = 6.0
FAULTS = ("kill", "restart", "stop, and go on in time", "stop, and go on too late")

TABLES: dict[type[Enum], ModuleType] = {
    decode.schedule.RequestState: decode.schedule,
    prefill.schedule.JobState: prefill.schedule,
    session.PeerState: session,
}
OWNERS = {session.PeerState: ("prefill:", "decode:")}


def table(module: ModuleType) -> list[str]:
    """The states that a module's docstring draws."""
    return re.findall(r"^\| ([A-Z_]+) +\|", module.__doc__ or "", re.MULTILINE)


def states() -> list[str]:
    """All of them, by the names that `state_hooks` gives them."""
    found = []
    for kind in TABLES:
        names = [f"{kind.__name__}.{state.name}" for state in kind]
        found += [f"{owner}{name}" for owner in OWNERS.get(kind, ("",)) for name in names]
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
    victim = str(service[case.victim].pid_path)
    Order(case.state, victim, case.number, at=case.at).place(service.order_path(case.owner))
    _provoke(service, case)
    until(lambda: _listen_until_fired(service, case), FIRE_TIMEOUT_S, f"{case}: reached")
    _follow_up(service, case)
    found = service.collect()
    service.recover()
    service.check_idle()
    return check_ended(found)


def _listen_until_fired(service: Service, case: Case) -> bool:
    service.listen(0.001)
    return service.has_fired(case.owner)


def _provoke(service: Service, case: Case) -> None:
    """What leads to the state."""
    if "PeerState" in case.state or "LaneTrials" in case.state:
        for _ in range(3):
            service.ask()
        other = "prefill" if case.owner == "decode" else "decode"
        service.finish(other, signal.SIGKILL)
        service[other].launch()
        return
    asked = [service.ask(num_tokens) for num_tokens in (20, 40, 28)]
    if case.state in ("RequestState.ABORTING", "JobState.ENDING"):
        service.listen(0.01)
        for one in asked:
            service.cancel(one)


def _follow_up(service: Service, case: Case) -> None:
    if case.fault in ("kill", "restart"):
        code = service.finish(case.victim, case.number)
        # a router has no way to end but a signal, nor has a worker that has just been forked
        expected = {0, -case.number} if case.fault == "restart" else {-case.number}
        assert code in expected, f"{case}: ended with {code}\n{service.tails()}"
        service[case.victim].start()
        return
    pause = SHORT_S if case.fault == FAULTS[2] else LONG_S
    service.listen(pause)
    service[case.victim].send(signal.SIGCONT)
