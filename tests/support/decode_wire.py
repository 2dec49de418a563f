"""A decode worker that a test plays in front of a real prefill worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.cluster import Cluster
from support.wire_peer import WirePeer
from support.workers import Worker

from kvxfer.control.messages import Grant, PrefillRequest, Welcome
from kvxfer.control.router_messages import Sampling

TOKENS = [(13 * i + 5) % 97 for i in range(18)]
OTHER_TOKENS = [(11 * i + 2) % 97 for i in range(18)]
GRANTED = [[9, 3, 7, 5, 11]]


def meet(cluster: Cluster, lane: str, **options: Any) -> tuple[Worker, WirePeer]:
    """A prefill worker, and a wire that it takes for a ready decode worker."""
    prefill = cluster.add("prefill", lane=lane, **options)
    wire = cluster.wire("decode", lane=lane, engine={"layout": "BLHNC"})
    wire.dial(prefill)
    greet(cluster, wire)
    return prefill, wire


def greet(cluster: Cluster, wire: WirePeer) -> None:
    """Say Hello until there is an answer, and learn the worker's regions from it."""
    known = len(wire.of(Welcome))
    cluster.until(lambda: wire.says(wire.hello()))
    cluster.until(lambda: len(wire.of(Welcome)) > known)
    facts = wire.of(Welcome)[-1].facts
    (rank,) = facts.ranks
    wire.connector.connect(facts.worker_id, rank.base_address, rank.description)


def ask(
    wire: WirePeer,
    name: str = "r",
    tokens: Sequence[int] = TOKENS,
    blocks: Sequence[Sequence[int]] | None = GRANTED,
    timeout_s: float = 30.0,
    grant: str = "",
    sampling: Sampling | None = None,
    num_cached: int = 0,
) -> tuple[str, str]:
    """Send a PrefillRequest; returns its request and grant ids."""
    grant_id = grant or f"grant-{name}"
    named = None if blocks is None else [list(ids) for ids in blocks]
    wire.send(
        PrefillRequest(
            name,
            list(tokens),
            sampling or Sampling(),
            Grant(grant_id, named, timeout_s, num_cached),
            False,
        )
    )
    return name, grant_id


def settled(cluster: Cluster, prefill: Worker) -> None:
    cluster.until(lambda: prefill.is_idle())
    prefill.check_conserved()
