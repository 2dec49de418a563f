"""Faults at every state: which there are, how each state is reached, and what must hold after."""

from __future__ import annotations

import contextlib
import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

from support.asked import check_ended
from support.cache_orders import CacheOrders, wake
from support.service import PEER_TIMEOUT_S, RECOVERY_TIMEOUT_S, ROLES, Service
from support.service_processes import until
from support.state_hooks import Order

import decode.lane_trials
import decode.schedule
import prefill.job
from kvxfer.control import session
from kvxfer.control.cache_messages import Shrink, Sleep, WakeUp
from kvxfer.errors import KvxferError
from kvxfer.worker import growth, residency
from kvxfer.worker.admission import GRANTS_AHEAD

SHORT_S = 0.2
"""Well within the peer's deadline, which is 1 s."""
LONG_S = PEER_TIMEOUT_S + 0.4
FIRE_TIMEOUT_S = 15.0
"""To reach a state: longer than a choice of lanes may take (5 s) that is begun again."""
FAULTS = ("kill", "restart", "stop, and go on in time", "stop, and go on too late")

TABLES: dict[type[Enum], ModuleType] = {
    decode.schedule.RequestState: decode.schedule,
    prefill.job.JobState: prefill.job,
    session.PeerState: session,
    residency.ResidencyState: residency,
    growth.GrowthState: growth,
}
BOTH = ("prefill:", "decode:")
OWNERS = dict.fromkeys((session.PeerState, residency.ResidencyState, growth.GrowthState), BOTH)
FEW_BLOCKS = 8
"""What a cache shrinks to, as far as its chunks let it (68)."""
OUTGROWING = (12, 24, 32)
"""So many prompts, their tokens, and new ones: of 95 blocks they need 84 to begin, 168 to end."""
LONG_PROMPT = 300
"""Tokens, of more blocks than that: it makes the cache grow again."""


def table(module: ModuleType) -> list[str]:
    """The states that a module's docstring draws, in its first table."""
    paragraphs = (module.__doc__ or "").split("\n\n")
    first = next(text for text in paragraphs if text.startswith("|"))
    return re.findall(r"^\| ([A-Z_]+) +\|", first, re.MULTILINE)


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
    order = Order(case.state, victim, case.number, at=case.at)
    with ExitStack() as undo:
        cache: CacheOrders | None = None
        if "ResidencyState" in case.state or "GrowthState" in case.state:
            cache = undo.enter_context(CacheOrders(service.addresses[case.owner]))
            _provoke_cache(service, case, cache, order)
        else:
            order.place(service.order_path(case.owner))
            _provoke(service, case)
        until(lambda: _listen_until_fired(service, case), FIRE_TIMEOUT_S, f"{case}: reached")
        _follow_up(service, case)
        if cache is not None and "stop" in case.fault:
            with contextlib.suppress(KvxferError):  # after Sleep, which may be on its way still
                cache.ask(WakeUp(), 2.0)
        found = service.collect()
    if "ResidencyState" in case.state:
        awake = wake(service.addresses[case.owner], RECOVERY_TIMEOUT_S)
        assert not awake, f"{case}: {awake}\n{service.tails()}"
    service.recover()
    service.check_idle()
    return check_ended(found)


def _listen_until_fired(service: Service, case: Case) -> bool:
    """Prompts that ended without it, as where a busy machine made peers seem silent, are followed
    by others."""
    service.listen(0.001)
    is_of_requests = case.state.startswith(("RequestState", "JobState"))
    if is_of_requests and not service.has_fired(case.owner) and service.has_ended:
        _provoke(service, case)
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
    if case.state == "RequestState.PREEMPTED":
        service.ask_together(*OUTGROWING)
        return
    lengths: tuple[int, ...] = (20, 40, 28)
    together = case.state.rpartition(".")[2] in ("ASKED", "QUEUED", "CALLED")
    if together:  # more than are granted at once
        lengths *= GRANTS_AHEAD
        service["decode"].send(signal.SIGSTOP)
    asked = [service.ask(num_tokens) for num_tokens in lengths]
    if together:
        service.listen(0.05)
        service["decode"].send(signal.SIGCONT)
    if case.state in ("RequestState.ABORTING", "JobState.ENDING"):
        service.listen(0.01)
        for one in asked:
            service.cancel(one)


def _provoke_cache(service: Service, case: Case, cache: CacheOrders, order: Order) -> None:
    """The cache goes and comes back, or grows, while prompts are under way."""
    path = service.order_path(case.owner)
    if "GrowthState" in case.state:
        few = cache.ask(Shrink([FEW_BLOCKS], 2.0))
        assert not few.problem, few
        order.place(path)
        service.ask(LONG_PROMPT)
        service.ask(28)
    elif case.state.endswith(("RESTORING", "AWAKE")):
        slept = cache.ask(Sleep(2.0))
        assert not slept.problem, slept
        order.place(path)
        cache.say(WakeUp())
    else:
        order.place(path)
        service.ask(28)
        service.ask(28)
        cache.say(Sleep(2.0))


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
