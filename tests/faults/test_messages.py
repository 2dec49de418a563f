"""Control messages that are lost, late, repeated or out of order, and connections that are cut: by
real proxies between real processes. What holds is what `Service` checks: no wrong token, an end for
every request, nothing held at idle, and service once the messages come through again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import pytest
from support.asked import check_ended
from support.fault_record import ROUNDS
from support.fork_server import ForkServer
from support.message_proxy import Faults, MessageProxy
from support.service import PEER_TIMEOUT_S, Service
from support.service_processes import free_port
from support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow

KINDS = {
    "lost": Faults(lose=0.1),
    "repeated": Faults(repeat=0.3),
    "late": Faults(hold_s=0.05),
    "out of order": Faults(delay=0.3, longest_delay_s=0.05),
    "all of it": Faults(0.05, 0.1, 0.2, 0.05, 0.005),
}
LANES = ("push", "pull")


class Proxied:
    """A service whose decode worker dials prefill, and whose router dials decode, by proxies."""

    def __init__(self, server: ForkServer, kind: type[MessageProxy] | type[TcpProxy], lane: str):
        self.proxies: list[MessageProxy | TcpProxy] = []
        with ExitStack() as undo:

            def via(address: str) -> str:
                proxy = undo.enter_context(kind(address, free_port()))
                self.proxies.append(proxy)
                return proxy.address

            connector = "nixl" if lane == "push" else "peer"
            self.service = undo.enter_context(
                Service(server, lane=lane, connector=connector, via=via)
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()


@pytest.fixture(params=LANES)
def proxied(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[Proxied]:
    found = Proxied(fork_server, MessageProxy, request.param)
    yield found
    found.close()


@pytest.fixture(params=LANES)
def linked(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[Proxied]:
    found = Proxied(fork_server, TcpProxy, request.param)
    yield found
    found.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are(kind: str, proxied: Proxied, counts: dict[str, Counter[str]]) -> None:
    service = proxied.service
    num_rounds = 20 if ROUNDS > 1 else 4
    tally = counts.setdefault("messages", Counter())
    for proxy in proxied.proxies:
        proxy.faults = KINDS[kind]
    for _ in range(num_rounds):
        for index in range(6):
            asked = service.ask((12, 28)[index % 2], num_common=(0, 0, 8, 22)[index % 4])
            if index == 5:
                service.listen(0.01)
                service.cancel(asked)
        ended = check_ended(service.collect())
        tally.update({f"requests ended in: {how}": number for how, number in ended.items()})
    seen: Counter[str] = Counter()
    for proxy in proxied.proxies:
        seen.update(asdict(proxy.counts))
        proxy.faults = Faults()
    tally.update({f"messages {what}": number for what, number in seen.items()})
    happened = {"lost": "lost", "repeated": "repeated", "out of order": "reordered"}.get(kind)
    assert happened is None or seen[happened] > 0, f"nothing was {kind}: {seen}"
    service.recover()
    service.check_idle()


def test_messages_are_cut_off_and_come_through_again(proxied: Proxied) -> None:
    """Connections stay: nobody is told but by silence."""
    service = proxied.service
    for _ in range(4):
        service.ask(28)
    service.listen(0.02)
    for proxy in proxied.proxies:
        proxy.is_cut = True
    service.listen(2 * PEER_TIMEOUT_S)
    for proxy in proxied.proxies:
        proxy.is_cut = False
    service.collect()
    service.recover()
    service.check_idle()


@pytest.mark.parametrize("pause_s", [0.3, 2 * PEER_TIMEOUT_S], ids=["in time", "too late"])
def test_a_link_is_cut_and_healed(linked: Proxied, pause_s: float) -> None:
    service = linked.service
    for _ in range(4):
        service.ask(28)
    service.listen(0.02)
    for proxy in linked.proxies:
        proxy.is_frozen = True
    service.listen(pause_s)
    for proxy in linked.proxies:
        proxy.is_frozen = False
    found = service.collect()
    if pause_s < PEER_TIMEOUT_S / 2:
        assert check_ended(found) == {"length": 4}, "a short cut costs nothing but time"
    service.recover()
    service.check_idle()


def test_connections_are_severed_again_and_again(linked: Proxied) -> None:
    service = linked.service
    for _ in range(5):
        service.ask(28)
        service.listen(0.03)
        for proxy in linked.proxies:
            proxy.sever()
    service.collect()
    service.recover()
    service.check_idle()


def test_a_slow_link_costs_time_alone(linked: Proxied) -> None:
    service = linked.service
    for proxy in linked.proxies:
        proxy.hold_s = 0.1
    for _ in range(4):
        service.ask()
    assert check_ended(service.collect()) == {"length": 4}
    service.check_idle()
