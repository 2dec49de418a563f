"""The cluster of `kvxfer.launch.ray_seam` as processes of this host: hosts as Ray's, but no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.launch.ray_host import WorkerHost
from kvxfer.launch.ray_seam import Bundle, Look, Order

IP = "127.0.0.1"


class HostHere:
    def __init__(self, order: Order) -> None:
        self.lost, self.is_faulty = "", False
        self._host: WorkerHost | None = WorkerHost(order, IP)

    def take(self) -> list[Look]:
        return [] if self._host is None else [self._host.look()]

    def stop(self) -> None:
        if self._host is not None:
            self._host.stop()
            self._host = None

    def lose(self) -> None:
        """As if its node died."""
        self.stop()
        self.lost = "its node died"


class GroupHere:
    def __init__(self, cluster: ClusterHere, bundles: Sequence[Bundle]) -> None:
        self.bundles = list(bundles)
        self.lacking = "no nodes"
        self.is_released = False
        self.hosts: list[HostHere] = []
        self._cluster = cluster

    @property
    def is_placed(self) -> bool:
        return self._cluster.has_room

    def start(self, index: int, order: Order, life: int) -> HostHere:
        assert self.is_placed and not self.is_released and index < len(self.bundles)
        self.hosts.append(HostHere(order))
        return self.hosts[-1]

    def release(self) -> None:
        self.is_released = True


class ClusterHere:
    """A context: no process outlives it."""

    def __init__(self) -> None:
        self.has_room = True
        self.groups: list[GroupHere] = []

    def __enter__(self) -> ClusterHere:
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self.groups:
            for host in group.hosts:
                host.stop()

    def reserve(self, bundles: Sequence[Bundle]) -> GroupHere:
        self.groups.append(GroupHere(self, bundles))
        return self.groups[-1]

    def check(self) -> None:
        return
