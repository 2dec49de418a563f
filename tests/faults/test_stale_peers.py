"""What a peer that was cut off can still do to whole workers with the descriptors that it has kept,
by NIXL over cross-memory attach and over TCP: nothing.

It was met, has learnt all regions, and falls silent while it holds a grant or a lease. It writes
NaN late to what was granted to it, and to what was revoked since, and reads everything, while
others are served. It does not write to memory in use that was never granted to it: nothing but the
lack of a key stops one who does. Whether a late access lands is the transport's affair; the counts
say how often it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.null_process import SPEC
from support.service import PEER_TIMEOUT_S, Service
from support.service_processes import free_port, until
from support.stale_process import Stale

from kvxfer.control.cache_messages import Shrink, Sleep, WakeUp

pytestmark = pytest.mark.slow

TRANSPORTS: dict[str, dict[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": "tcp"}}
LOST_S = 3 * PEER_TIMEOUT_S
KEPT_BLOCKS = 40
WAIT_S = 0.5
UNHEARD = ("nothing heard for", "patience is over", "deadline passed")
"""Why a request may end that had to wait for too long."""

Places = list[list[int]]


@dataclass
class Pair:
    """A service, and a stale peer of one of its workers."""

    service: Service
    stale: Stale
    victim: str
    tally: Counter[str]

    def status(self, name: str) -> Any:
        return self.service.status(self.victim)[name]

    def serve(self, num: int = 4, num_tokens: int = 12) -> None:
        """Each in full and right; but for what a busy machine loses, which is no wrong KV."""
        for _ in range(num):
            self.service.ask(num_tokens, 4)
        self.collect()

    def collect(self) -> None:
        found = self.service.collect()
        for one in found:
            assert one.is_served or any(word in one.error for word in UNHEARD), one
        assert any(one.is_served for one in found), found

    def manage(self, request: Any) -> Any:
        return self.service.manage(self.victim, request)

    def revoked(self, known: Places) -> Places:
        """What the peer knows and the worker has registered no more."""
        now = {(one.offset, one.size) for one in self.service.regions(self.victim)}
        return [place for place in known if tuple(place) not in now]

    def rest(self) -> dict[str, int]:
        struck = self.stale.do("rest")
        self.tally.update({f"late {how}": number for how, number in struck.items()})
        assert sum(struck.values()) > 0
        return struck

    def is_lost(self, peers: int) -> bool:
        return bool(self.status("peers") == peers)

    def lose(self) -> None:
        """The peer is cut off, and that is noticed."""
        before = self.status("peers")
        self.stale.do("cut_off")
        until(lambda: self.is_lost(before - 1), LOST_S, "the stale peer is lost")

    def bury(self) -> None:
        """Another process of the same worker comes: the stale one is known to be dead, and nothing
        is kept for it. Then that one goes, too, having been granted nothing."""
        self.stale.end()
        self.stale.start()
        self.stale.until_it_has("regions")
        until(lambda: self.status("tombstone_bytes") == 0, LOST_S, "tombstones are gone")
        until(lambda: self.status("blocks_quarantined") == 0, LOST_S, "quarantine has ended")
        self.lose()
        self.stale.end()
        self.service.recover()
        self.service.check_idle()


@pytest.fixture(params=TRANSPORTS)
def make(
    request: pytest.FixtureRequest,
    fork_server: ForkServer,
    tmp_path: Path,
    counts: dict[str, Counter[str]],
) -> Iterator[Callable[[str, str], Pair]]:
    environment = TRANSPORTS[request.param]
    with ExitStack() as undo:

        def made(victim: str, lane: str) -> Pair:
            address = f"tcp://127.0.0.1:{free_port()}"
            dials = [address] if victim == "decode" else []
            service = undo.enter_context(
                Service(
                    fork_server,
                    lane=lane,
                    environment=environment,
                    also_dial=dials,
                    name=f"a stale peer of {victim}, {lane} by {request.param}",
                )
            )
            order: dict[str, Any] = {"role": "decode", "dial": service.addresses["prefill"]}
            if victim == "decode":
                order = {"role": "prefill", "listen": address}
            options = {"lane": lane}
            stale = Stale(
                fork_server, tmp_path / "stale.log", environment, options=options, **order
            )
            undo.callback(stale.end)
            stale.start()
            return Pair(service, stale, victim, counts.setdefault("stale peers", Counter()))

        yield made


def test_a_late_writer_to_decode_reaches_quarantine_and_tombstones_only(
    make: Callable[[str, str], Pair],
) -> None:
    pair = make("decode", "push")
    service, stale = pair.service, pair.stale
    known = stale.until_it_has("regions")
    for _ in range(4):
        service.ask(12, 4)
    granted = stale.until_it_has("blocks")
    stale.do("strike", places=granted, ways=["push"])
    service.listen(0.2)
    assert pair.rest()["push landed"] > 0, "it may write, so far"
    stale.do("strike", places=granted, ways=["push", "pull"])
    pair.lose()
    pair.collect()  # what it had is prefilled elsewhere
    granted = stale.do("look")["blocks"]
    assert pair.status("blocks_quarantined") * SPEC.num_layers >= len(granted) > 0
    pair.serve(8)

    shrunk = pair.manage(Shrink([KEPT_BLOCKS], WAIT_S))
    assert shrunk.tombstone_bytes > 0, shrunk
    pair.rest()
    gone = pair.revoked(known)
    assert sum(size for _, size in gone) == shrunk.tombstone_bytes
    stale.do("strike", places=[*granted, *gone], ways=["push", "pull"])
    pair.serve(8)
    pair.rest()

    stale.do("strike", places=granted, ways=["push", "pull"])
    pair.serve(8, 28)
    assert pair.status("blocks_total") > KEPT_BLOCKS, "it grew over tombstones"
    refused = pair.manage(Sleep(WAIT_S))
    assert refused.problem and not refused.is_sleeping, "somebody may still write there"
    pair.rest()
    stale.do("strike", places=known, ways=["pull"])
    pair.serve(4)
    pair.rest()
    pair.bury()


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_a_worker_sleeps_and_wakes_under_a_stale_peer(
    victim: str, make: Callable[[str, str], Pair]
) -> None:
    """At prefill it holds a lease, of which it reads on, at decode nothing."""
    pair = make(victim, "push" if victim == "decode" else "pull")
    stale = pair.stale
    known = stale.until_it_has("regions")
    if victim == "prefill":
        until(lambda: pair.is_lost(2), LOST_S, "prefill has met it")
        stale.do("ask", tokens=list(range(30)))
        stale.until_it_has("blocks")
    stale.do("strike", places=known, ways=["pull"])
    pair.service.listen(0.2)
    assert pair.rest()["pull landed"] > 0, "it may read, so far"
    stale.do("strike", places=known, ways=["pull"])
    pair.lose()
    pair.serve()

    asleep = pair.manage(Sleep(WAIT_S))
    assert asleep.is_sleeping and not asleep.problem, asleep
    assert asleep.tombstone_bytes == sum(size for _, size in known)
    pair.rest()
    stale.do("strike", places=known, ways=["push", "pull"])
    pair.service.listen(0.5)
    pair.rest()

    stale.do("strike", places=known, ways=["pull"])
    awake = pair.manage(WakeUp())
    assert not awake.is_sleeping and not awake.problem, awake
    pair.serve(8, 28)
    pair.rest()
    pair.bury()
