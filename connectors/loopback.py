"""The in-process twin of a transport: agents of one process copy each other's host memory.

It keeps NIXL's manners (additive connections, announced ranges only, completion seen by a poll)
and one guard that NIXL lacks: a range deregistered after it was announced ends the ticket in an
error, where NIXL would touch the memory all the same. Bytes move during `poll`, as late as a
transport may move them, so that a source reused too early shows as wrong bytes.

One memmove a run: 2 µs for 2 KiB, 100,000 runs of 100 bytes in 0.15 s (measured). Gathering whole
groups of equal runs through strided numpy views was faster only for those of 100 bytes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer, check_plan
from kvxfer.transfer.regions import Region, RegionSet

_AGENTS: weakref.WeakValueDictionary[str, LoopbackAgent] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A started transfer, and with whom."""

    direction: Direction
    remote: RemotePeer
    plan: TransferPlan


class LoopbackAgent(Agent):
    """Found by name among the agents of this process for as long as its connector holds it."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        if memory.device != "cpu":
            raise UsageError("device", memory.device, "loopback copies host memory only")
        if name in _AGENTS:
            raise ConnectorError(f"agent {name} exists in this process already")
        self._memory = memory
        self._registered: set[Region] = set()
        _AGENTS[name] = self

    def register(self, region: Region) -> Region:
        self._registered.add(region)
        return region

    def deregister(self, handle: Region) -> None:
        self._registered.remove(handle)

    def metadata(self, regions: Sequence[Region]) -> bytes:
        return b""

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        owner = _AGENTS.get(remote.agent)
        if owner is None or owner._memory.base_address != remote.base_address:
            raise ConnectorError(
                f"no agent {remote.agent} at {remote.base_address:#x} in this process"
            )

    def remove_peer(self, agent: str) -> None:
        """Nothing is kept of a peer."""

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> _Copy:
        return _Copy(direction, remote, plan)

    def is_finished(self, handle: _Copy) -> bool:
        """Copies all the runs now; any error is found before the first byte moves."""
        owner = _AGENTS.get(handle.remote.agent)
        if owner is None:
            raise ConnectorError(f"agent {handle.remote.agent} is gone")
        check_plan(handle.plan, handle.direction, self._reachable(), owner._reachable())
        source, destination = self._memory.base_address, handle.remote.base_address
        if handle.direction is Direction.PULL:
            source, destination = destination, source
        runs = zip(
            (handle.plan.dst_offsets + destination).tolist(),
            (handle.plan.src_offsets + source).tolist(),
            handle.plan.sizes.tolist(),
            strict=True,
        )
        for to, origin, size in runs:
            ctypes.memmove(to, origin, size)
        return True

    def progress(self) -> None:
        """Peers help themselves."""

    def _reachable(self) -> RegionSet:
        return RegionSet(tuple(sorted(self._registered)))


class LoopbackConnector(AgentConnector):
    """Moves bytes between the windows of one process."""

    agent_class = LoopbackAgent


CONNECTOR = LoopbackConnector
