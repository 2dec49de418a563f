"""The bookkeeping that transports with agents share: regions, peers, tickets, orderly endings.

`Agent` is what such a transport must do; `AgentConnector` makes a `Connector` of it. NIXL and the
in-process loopback are built this way, so the tests of one exercise the bookkeeping of both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, TicketResult
from kvxfer.transfer.exercise import exercise_pair
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import (
    Description,
    RemotePeer,
    check_plan,
    check_registered,
    extend,
    learn,
    shrink,
)
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.transfer.warming import Warming

_CLOSE_TIMEOUT_S = 5.0
_LAST_READ_TIMEOUT_S = 0.2
_POLL_INTERVAL_S = 0.0005
_ABANDONED: list[object] = []  # what an unfinished transfer still uses, kept from the collector


class Agent(ABC):
    """One end of a transport. Every failure is a ConnectorError; handles are opaque."""

    @abstractmethod
    def __init__(self, name: str, memory: MemoryWindow) -> None:
        """Start it. Dropping the last reference ends it, once all below was undone."""

    @abstractmethod
    def register(self, region: Region) -> Any:
        """Make a committed range reachable; the answer is what `deregister` takes."""

    @abstractmethod
    def deregister(self, handle: Any) -> None: ...

    @abstractmethod
    def metadata(self, regions: Sequence[Region]) -> bytes:
        """What `add_peer` of another agent needs to reach these regions, perhaps none."""

    @abstractmethod
    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        """Learn an agent or more of its regions. Changes nothing when it raises."""

    @abstractmethod
    def remove_peer(self, agent: str) -> None:
        """Forget an agent that no transfer uses; an unknown one is ignored."""

    @abstractmethod
    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> Any:
        """Move the runs of a checked plan. Raises only while nothing has moved yet."""

    def warm(self, remote: RemotePeer, regions: Sequence[Region]) -> Any:
        """Start a read of a little of each of the peer's new `regions` into memory of our own that
        nothing else uses: a handle as `start`'s, or None where there is nothing to warm up."""
        return None

    @abstractmethod
    def is_finished(self, handle: Any) -> bool:
        """Whether a transfer succeeded; raises when it ended otherwise.

        Either way the transfer's resources are free then, and its handle is not asked about again.
        """

    @abstractmethod
    def progress(self) -> None:
        """Serve peers' requests."""


@dataclass(slots=True)
class _Flight:
    """A started transfer. `error` is set once its bytes must not be used, however it ends."""

    handle: Any
    agent: str
    error: str | None = None


class AgentConnector(Connector):
    """A Connector over one `Agent`, of the class that a subclass names."""

    agent_class: ClassVar[type[Agent]]

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        self._name = agent_name
        self._memory = memory
        self._regions = RegionSet()
        self._handles: dict[Region, Any] = {}
        self._peers: dict[str, RemotePeer] = {}
        self._flights: dict[int, _Flight] = {}
        self._leaving: set[str] = set()
        self._ended: list[TicketResult] = []
        self._tickets = count(1)
        self._warming = Warming()
        self._agent: Agent | None = self.agent_class(agent_name, memory)

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """By two agents more, over the halves of `scratch`, in both directions."""
        with ExitStack() as undo:
            exercise_pair(self.agent_class, f"{self._name}.scratch", scratch, undo)
            return undo.pop_all()

    def register(self, regions: Sequence[Region]) -> None:
        agent = self._open()
        extended = extend(self._regions, regions, self._memory.size_bytes)
        handles = {}
        with ExitStack() as undo:
            for region in regions:
                handles[region] = agent.register(region)
                undo.callback(agent.deregister, handles[region])
            undo.pop_all()
        self._handles |= handles
        self._regions = extended

    def deregister(self, regions: Sequence[Region]) -> None:
        agent = self._open()
        self._regions = shrink(self._regions, regions)
        with ExitStack() as release:
            for region in set(regions):
                release.callback(agent.deregister, self._handles.pop(region))

    def describe(self, regions: Sequence[Region]) -> bytes:
        agent = self._open()
        check_registered(self._regions, regions)
        return Description(
            agent=self._name,
            device=self._memory.device,
            regions=[(region.offset, region.size) for region in regions],
            transport=agent.metadata(regions),
        ).to_bytes()

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        agent = self._open()
        told = Description.from_bytes(description)
        learnt = learn(self._peers, self._name, peer, base_address, told)
        if learnt.agent in self._leaving:
            self._advance(agent)  # a broken connection is gone before the new one starts
        agent.add_peer(learnt, told.transport)
        self._leaving.discard(learnt.agent)
        known = self._peers.get(peer)
        self._peers[peer] = learnt
        old = known.regions.regions if known is not None and known.agent == learnt.agent else ()
        self._warming.add(learnt, sorted(set(learnt.regions.regions).difference(old)))
        if known is not None and known.agent != learnt.agent:
            self._leave(agent, known.agent, f"peer {peer} is agent {learnt.agent} now")

    def renew(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """Waits up to 5 s for a read ahead of use, of which the owner knows nothing.

        ConnectorError if that has not ended then: it may still touch what was revoked, as the
        owner has to assume of a peer that does not confirm.
        """
        agent = self._open()
        remote = self._peers.get(peer)
        if remote is not None:
            self._warming.forget(remote.agent)
            if not self._wait(
                agent, lambda: not self._warming.is_reading(remote.agent), _CLOSE_TIMEOUT_S
            ):
                self.disconnect(peer)
                raise ConnectorError(f"peer {peer}: a read of its regions did not end")
        super().renew(peer, base_address, description, invitation)

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        agent = self._open()
        remote = self._peers.get(peer)
        if remote is None:
            raise ConnectorError(f"peer {peer} is not connected")
        check_plan(plan, direction, self._regions, remote.regions)
        ticket = next(self._tickets)
        if plan.total_bytes:
            self._flights[ticket] = _Flight(agent.start(direction, remote, plan), remote.agent)
        else:
            self._ended.append(TicketResult(ticket))
        return ticket

    def poll(self) -> list[TicketResult]:
        self._advance(self._open())
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, peer: str) -> None:
        """The peer's tickets end, in an error, when the transport has stopped moving their bytes:
        at the next poll or, where it cannot stop (NIXL), when they are through."""
        agent = self._open()
        remote = self._peers.pop(peer, None)
        if remote is not None:
            self._leave(agent, remote.agent, f"peer {peer} was disconnected")

    def is_leaving(self, agent: str) -> bool:
        return agent in self._leaving

    def close(self) -> None:
        """Waits up to 5 s for transfers in progress.

        Raises ConnectorError when some did not end: the agent then lives on, since they still use
        it, and the memory must stay mapped for the rest of the process.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        self._warming.forget_all()
        if not self._wait(agent, lambda: not self._flights, _CLOSE_TIMEOUT_S):
            _ABANDONED.append((agent, self._flights, self._warming))
            raise ConnectorError(
                f"agent {self._name}: {len(self._flights)} transfers did not end in "
                f"{_CLOSE_TIMEOUT_S:.0f} s; their memory must stay mapped"
            )
        if not self._wait(agent, lambda: not self._warming.is_under_way, _LAST_READ_TIMEOUT_S):
            _ABANDONED.append((agent, self._warming))  # it writes to memory of the agent's own
            return
        with ExitStack() as release:
            for handle in self._handles.values():
                release.callback(agent.deregister, handle)
            for name in self._leaving.union(peer.agent for peer in self._peers.values()):
                release.callback(agent.remove_peer, name)
        self._handles.clear()
        self._peers.clear()

    def _wait(self, agent: Agent, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Advance until `is_done`, or not for longer: whether it is."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                return False
            self._advance(agent)
            time.sleep(_POLL_INTERVAL_S)
        return True

    def _open(self) -> Agent:
        if self._agent is None:
            raise ConnectorError(f"connector {self._name} is closed")
        return self._agent

    def _advance(self, agent: Agent) -> None:
        agent.progress()
        for ticket, flight in list(self._flights.items()):
            try:
                if not agent.is_finished(flight.handle):
                    continue
            except ConnectorError as error:
                flight.error = flight.error or str(error)
            del self._flights[ticket]
            self._ended.append(TicketResult(ticket, flight.error))
        self._warming.advance(agent)
        self._sweep(agent)

    def _leave(self, agent: Agent, name: str, reason: str) -> None:
        for flight in self._flights.values():
            if flight.agent == name:
                flight.error = flight.error or reason
        self._warming.forget(name)
        self._leaving.add(name)
        self._sweep(agent)

    def _sweep(self, agent: Agent) -> None:
        """Remove the peers' agents that are to go and that no transfer uses any more."""
        busy = {flight.agent for flight in self._flights.values()}
        for name in sorted(self._leaving - busy):
            if self._warming.is_reading(name):
                continue
            self._leaving.remove(name)
            agent.remove_peer(name)
