"""Workers whose roles do nothing, as peers of one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.cluster import Cluster
from support.wire_peer import WirePeer
from support.workers import Worker

from kvxfer.control.messages import Heartbeat


class Events:
    """What a PeerTable told its role."""

    def __init__(self, worker: Worker) -> None:
        self.ready: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.fenced: list[str] = []
        worker.peers.on_ready = lambda peer: self.ready.append(peer.name)
        worker.peers.on_lost = lambda peer, reason: self.lost.append((peer.name, reason))
        worker.peers.on_fenced = self.fenced.append


def idle_pair(
    cluster: Cluster,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[Worker, Worker]:
    """A prefill and a decode worker, of which the second dials the first."""
    made = cluster.add("prefill", idle=True, **{**both, **(prefill or {})})
    dialler = cluster.add("decode", idle=True, **{**both, **(decode or {})})
    dialler.peers.dial(made.address)
    return made, dialler


def both_ready(*workers: Worker) -> Callable[[], bool]:
    return lambda: all(bool(worker.peers.ready()) for worker in workers)


def dialled(cluster: Cluster, **options: Any) -> tuple[Worker, WirePeer]:
    """A prefill worker and a wire that has a connection to it."""
    prefill = cluster.add("prefill", idle=True, **options)
    wire = cluster.wire("decode")
    wire.dial(prefill)
    cluster.until(lambda: wire.says(Heartbeat()))
    return prefill, wire


def answers(wire: WirePeer, kind: str, count: int = 1) -> Callable[[], bool]:
    return lambda: len([m for m in wire.received if type(m).__name__ == kind]) >= count
