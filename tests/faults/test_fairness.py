"""One peer that is stopped, or slow, holds up nobody else: two decode workers share a prefill
worker, or two prefill workers serve one decode worker, real processes all."""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.asked import Asked
from support.fork_server import ForkServer
from support.service import PEER_TIMEOUT_S, Service
from support.service_processes import free_port, until
from support.tcp_proxy import TcpProxy

LANES: dict[str, dict[str, Any]] = {
    "push": {"lane": "push", "connector": "nixl"},
    "pull": {"lane": "pull", "connector": "peer"},
    "tcp": {"lane": "push", "connector": "nixl", "environment": {"UCX_TLS": "tcp"}},
}
SOON_S = 0.75 * PEER_TIMEOUT_S
"""For a prompt that waits for nobody: it takes 0.05 to 0.2 s, on a busy machine. Who waits for a
worker that is stopped does so until that is noticed."""
BUSY = 5
"""Times what it takes while all is well: the bound of a machine too busy for the other one."""
NOTICED_S = PEER_TIMEOUT_S + 1.0
QUEUE = 8
FLOOD = 3 * QUEUE
"""More than the queues hold."""
HOLD_S = 0.15
"""By which all that is said to the slow one, and by it, is late."""
SLOW_S = 20 * HOLD_S

Start = Callable[..., Service]


@pytest.fixture(
    params=[
        "push",
        pytest.param("pull", marks=pytest.mark.slow),
        pytest.param("tcp", marks=pytest.mark.slow),
    ]
)
def start(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[Start]:
    with ExitStack() as undo:

        def made(workers: tuple[int, int], slow: str = "") -> Service:
            """What is said between `slow` and the workers of the other role is late."""
            lane, queue = LANES[request.param], {"max_num_queued_seqs": QUEUE, "lane_test": False}
            service = Service(fork_server, workers=workers, **lane, **queue)
            if slow:
                listener = slow if slow.startswith("prefill") else "prefill"
                dialler = slow if slow.startswith("decode") else "decode"
                address = service.addresses[listener]
                proxy = undo.enter_context(TcpProxy(address, free_port()))
                dial = service[dialler].order["dial"]
                dial[dial.index(address)] = proxy.address
                proxy.hold_s = HOLD_S
            return undo.enter_context(service)

        yield made


def soon(service: Service) -> float:
    """For a prompt of `service`, while all is well."""
    return max(SOON_S, BUSY * serve(service, within_s=SLOW_S))


def serve(service: Service, within_s: float, num: int = 4) -> float:
    """By the first router, whatever else is under way: whole, right and, most of them, in time;
    seconds that these took."""
    asked = [service.ask(20, 4) for _ in range(num)]
    await_all(service, asked, within_s + SLOW_S)
    assert [one.reason for one in asked] == ["length"] * num, asked
    took_s = statistics.median(one.took_s for one in asked)
    assert took_s < within_s, f"{took_s:.2f} s\n{service.tails()}"
    return took_s


def await_all(service: Service, asked: list[Asked], timeout_s: float) -> None:
    def all_ended() -> bool:
        service.listen(0.005)
        return all(one.reason for one in asked)

    until(all_ended, timeout_s, "requests end")


def serve_until_noticed(service: Service, by: str, within_s: float) -> None:
    """Until `by` has one peer less, which must be in time."""
    began = time.monotonic()
    while service.status(by)["peers"] == 2:
        assert time.monotonic() - began < NOTICED_S + within_s, "nobody notices"
        serve(service, within_s=within_s)
        check_queues(service)
    assert f"nothing heard for {PEER_TIMEOUT_S:g} s" in service[by].tail()


def check_queues(service: Service) -> None:
    """A prefill worker has one for each decode worker."""
    for worker in service.workers:
        if service[worker].is_stopped():
            continue
        limit = QUEUE * (2 if worker == "prefill" else 1)
        assert service.status(worker)["queued"] <= limit


def finish(service: Service, counts: dict[str, Counter[str]]) -> None:
    """Everybody serves again, and nothing is held."""
    tally = counts.setdefault("fairness", Counter())
    tally.update(f"requests {one.reason}" for one in service.collect())
    for router in service.routers:
        service.recover(router=router)
    service.check_idle()


def test_a_decode_worker_that_is_stopped_holds_up_no_other(
    start: Start, counts: dict[str, Counter[str]]
) -> None:
    service = start((1, 2))
    soon_s = soon(service)
    for _ in range(FLOOD):
        service.ask(20, 4, "router-1")
    service.listen(0.02)
    service["decode-1"].send(signal.SIGSTOP)
    serve_until_noticed(service, "prefill", soon_s)
    serve(service, soon_s)
    service["decode-1"].send(signal.SIGCONT)
    finish(service, counts)


@pytest.mark.slow
def test_a_prefill_worker_that_is_stopped_costs_its_requests_the_deadline(
    start: Start, counts: dict[str, Counter[str]]
) -> None:
    service = start((2, 1))
    soon_s = soon(service)
    flood = [service.ask(20, 4) for _ in range(QUEUE)]
    service.listen(0.01)
    service["prefill-1"].send(signal.SIGSTOP)
    serve_until_noticed(service, "decode", NOTICED_S + soon_s)
    await_all(service, flood, SLOW_S)
    assert {one.reason for one in flood} == {"length"}, "what it had is prefilled elsewhere"
    serve(service, soon_s)
    service["prefill-1"].send(signal.SIGCONT)
    finish(service, counts)


@pytest.mark.slow
def test_a_slow_decode_worker_holds_up_no_other(
    start: Start, counts: dict[str, Counter[str]]
) -> None:
    service = start((1, 2), slow="decode-1")
    soon_s = soon(service)
    slow = [service.ask(20, 4, "router-1") for _ in range(QUEUE)]
    while not all(one.reason for one in slow):
        serve(service, soon_s)
        check_queues(service)
    assert {one.reason for one in slow} == {"length"}, "late is not lost"
    finish(service, counts)


@pytest.mark.slow
def test_a_slow_prefill_worker_costs_time_alone(
    start: Start, counts: dict[str, Counter[str]]
) -> None:
    service = start((2, 1), slow="prefill-1")
    for _ in range(4):
        serve(service, within_s=SLOW_S)
        check_queues(service)
    finish(service, counts)
