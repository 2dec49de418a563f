"""A link between two network namespaces, with all of NIXL's traffic on it, that is cut and healed,
loses packets, or is slow.

Facts, measured on Linux 6.18 with nftables 1.0: `numgen random mod 100 < 5 drop` in an input hook
drops that share of the packets, which TCP sends again; the kernel here has no `netem`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.asked import check_ended
from support.fault_record import ROUNDS
from support.fork_server import ForkServer
from support.linked import LinkedService, skip_unless_linked
from support.service import PEER_TIMEOUT_S

pytestmark = pytest.mark.slow

LANES = ("push", "pull")


@pytest.fixture
def start(fork_server: ForkServer) -> Iterator[Callable[[str], LinkedService]]:
    skip_unless_linked()
    with ExitStack() as undo:
        yield lambda lane: undo.enter_context(LinkedService(fork_server, lane))


def checked(service: LinkedService, counts: dict[str, Counter[str]]) -> dict[str, int]:
    found = check_ended(service.collect())
    tally = counts.setdefault("links", Counter())
    tally.update({f"requests ended in: {how}": number for how, number in found.items()})
    return found


@pytest.mark.parametrize("lane", LANES)
def test_a_link_is_cut_and_healed(
    lane: str, start: Callable[[str], LinkedService], counts: dict[str, Counter[str]]
) -> None:
    service = start(lane)
    for _ in range(4):
        service.ask(28)
    service.listen(0.02)
    service.link.cut()
    service.listen(2 * PEER_TIMEOUT_S)
    service.link.heal()
    checked(service, counts)
    service.recover(20.0)  # TCP sends again after 0.2, 0.4, 0.8, … s
    service.check_idle()


@pytest.mark.parametrize("lane", LANES)
def test_a_link_loses_one_packet_in_twenty(
    lane: str, start: Callable[[str], LinkedService], counts: dict[str, Counter[str]]
) -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft not found (nftables)")
    service = start(lane)
    service.link.lose(5)
    for _ in range(10 if ROUNDS > 1 else 2):
        for _ in range(4):
            service.ask(28)
        checked(service, counts)
    assert service.link.num_lost() > 0
    service.link.lose(0)
    service.recover(20.0)
    service.check_idle()


@pytest.mark.parametrize("lane", LANES)
def test_a_slow_link_costs_time_alone(
    lane: str, start: Callable[[str], LinkedService], counts: dict[str, Counter[str]]
) -> None:
    service = start(lane)
    service.link.shape(4)
    for _ in range(4):
        service.ask(28)
    assert checked(service, counts) == {"length": 4}
    service.check_idle()
