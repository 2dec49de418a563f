"""A Connector over agents: regions, peers, tickets, epochs, orderly endings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from kvxfer.errors import ConnectorError
from kvxfer.memory.limits import host_identity
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.agent_epoch import AgentEpoch, agent_name, life_of
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

_CLOSE_TIMEOUT_S = 5.0
_LAST_READ_S = 0.2
_POLL_INTERVAL_S = 0.0005
_ABANDONED: list[object] = []  # what an unfinished transfer still uses, kept from the collector


@dataclass(slots=True)
class _Flight:
    """A started transfer. `error` is set once its bytes must not be used, however it ends."""

    handle: Any
    epoch: AgentEpoch
    agent: str
    error: str | None = None


class AgentConnector(Connector):
    """A Connector over one `Agent` at a time, of the class that a subclass names."""

    agent_class: ClassVar[type[Agent]]
    renews_agent: ClassVar[bool] = True
    """Whether what a peer may reach, or what is kept of one that was lost, goes with the agent."""
    settle_s: ClassVar[float] = 0.0
    """As `AgentEpoch`'s."""

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        self._name = agent_name
        self._memory = memory
        self._regions = RegionSet()
        self._peers: dict[str, RemotePeer] = {}
        self._told: dict[str, tuple[bytes, ...]] = {}
        """By peer: its agent's metadata."""
        self._flights: dict[int, _Flight] = {}
        self._ended: list[TicketResult] = []
        self._tickets = count(1)
        self._epoch = self._begun(0, agent_name)
        self._past: list[AgentEpoch] = []
        """Earlier ones, which peers or transfers of ours may still use."""
        self._ending: list[AgentEpoch] = []
        """Those of which no peer uses any more."""
        self._wear = 0
        self._is_closed = False

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """By two agents more, over the halves of `scratch`, in both directions."""
        with ExitStack() as undo:
            exercise_pair(self.agent_class, f"{self._name}.scratch", scratch, undo)
            return undo.pop_all()

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        extended = extend(self._regions, regions, self._memory.size_bytes)
        self._epoch.register(regions)
        self._regions = extended

    def deregister(self, regions: Sequence[Region]) -> None:
        self._check_open()
        self._regions = shrink(self._regions, regions)
        with ExitStack() as release:
            for epoch in self._epochs():
                release.callback(epoch.deregister, regions)

    def describe(self, regions: Sequence[Region]) -> bytes:
        self._check_open()
        check_registered(self._regions, regions)
        return Description(
            agent=self._epoch.name,
            device=self._memory.device,
            regions=[(region.offset, region.size) for region in regions],
            transport=self._epoch.agent.metadata(regions),
            host=host_identity(),
        ).to_bytes()

    def revoke(self, left: Sequence[Region], epoch: int) -> bytes:
        """By a new agent. Transfers of ours that are under way go on with the old one."""
        if not self.renews_agent:
            return self.describe(left)
        self._check_open()
        check_registered(self._regions, left)
        name = agent_name(self._name, epoch)
        fresh = self._begun(epoch, name)
        fresh.register(left)
        for peer, remote in self._peers.items():
            if self.knows_ahead(remote):
                fresh.expect(remote, self._told[peer])
        self._epoch.rest()
        self._past.append(self._epoch)
        self._epoch = fresh
        self._wear = 0
        return self.describe(left)

    def retire(self, kept: Collection[int]) -> None:
        self._check_open()
        for epoch in [one for one in self._past if one.number not in kept]:
            self._past.remove(epoch)
            self._ending.append(epoch)
        self._sweep()

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """ConnectorError also while something is under way with an earlier agent of the peer: its
        owner takes our word for it that there is nothing, and ends it."""
        self._check_open()
        told = Description.from_bytes(description)
        learnt = learn(self._peers, self._epoch.name, peer, base_address, told)
        self._check_at_rest(peer, learnt.agent)
        if self._epoch.is_leaving(learnt.agent):
            self._advance(learnt.agent)  # a broken connection is gone before the new one starts
        is_ahead = self._epoch.knows(learnt.agent) or self.knows_ahead(learnt)
        if is_ahead:
            self._epoch.learn(learnt, told.transport)
        known = self._peers.get(peer)
        is_same = known is not None and known.agent == learnt.agent
        self._peers[peer] = learnt
        before = self._told[peer] if is_same else ()
        self._told[peer] = (*(one for one in before if one != told.transport), told.transport)
        old = known.regions.regions if known is not None and is_same else ()
        if is_ahead:
            self._epoch.warming.add(learnt, sorted(set(learnt.regions.regions).difference(old)))
        if known is not None and not is_same:
            self._leave(known.agent, f"peer {peer} is agent {learnt.agent} now")

    def knows_ahead(self, remote: RemotePeer) -> bool:
        """Whether to know a peer as soon as it was described to us; else when something is first
        moved to it or from it, and never where that is its part."""
        return True

    def renew(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """Waits up to 5 s for a read ahead of use, of which the owner knows nothing, and for what
        an earlier session with the peer left under way.

        ConnectorError if that has not ended then: it may still touch what was revoked, as the
        owner has to assume of a peer that does not confirm.
        """
        self._check_open()
        remote = self._peers.get(peer)
        if remote is not None:
            life = life_of(remote.agent)
            for epoch in self._epochs():
                epoch.forget(remote.agent)
            if not self._wait(lambda: not self._in_use(life), _CLOSE_TIMEOUT_S):
                self.disconnect(peer)
                raise ConnectorError(f"peer {peer}: a transfer over its regions did not end")
        super().renew(peer, base_address, description, invitation)

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        self._check_open()
        remote = self._peers.get(peer)
        if remote is None:
            raise ConnectorError(f"peer {peer} is not connected")
        check_plan(plan, direction, self._regions, remote.regions)
        if plan.total_bytes:
            self._epoch.reach(remote, self._told[peer])
            handle = self._epoch.agent.start(direction, remote, plan)
            return self._took_off(remote.agent, handle)
        ticket = next(self._tickets)
        self._ended.append(TicketResult(ticket))
        return ticket

    def poll(self) -> list[TicketResult]:
        self._check_open()
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, peer: str) -> None:
        """The peer's tickets end, in an error, when the transport has stopped moving their bytes:
        at the next poll or, where it cannot stop (NIXL), when they are through."""
        self._check_open()
        self._told.pop(peer, None)
        remote = self._peers.pop(peer, None)
        if remote is not None:
            self._wear += 1
            self._leave(remote.agent, f"peer {peer} was disconnected")

    def is_leaving(self, agent: str) -> bool:
        return any(epoch.leaves_life(life_of(agent)) for epoch in self._epochs())

    @property
    def wear(self) -> int:
        return self._wear + self._epoch.num_failed if self.renews_agent else 0

    def close(self) -> None:
        """Waits up to 5 s for transfers in progress.

        Raises ConnectorError when some did not end: their agents then live on, since they still
        use them, and the memory must stay mapped for the rest of the process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        epochs = self._epochs()
        for epoch in epochs:
            epoch.rest()
        if not self._wait(lambda: not self._flights, _CLOSE_TIMEOUT_S):
            _ABANDONED.append((epochs, self._flights))
            raise ConnectorError(
                f"agent {self._name}: {len(self._flights)} transfers did not end in "
                f"{_CLOSE_TIMEOUT_S:.0f} s; their memory must stay mapped"
            )
        self._wait(lambda: not any(one.warming.is_under_way for one in epochs), _LAST_READ_S)
        with ExitStack() as release:
            for epoch in epochs:
                if epoch.warming.is_under_way:
                    _ABANDONED.append(epoch)  # it writes to memory of the agent's own
                else:
                    release.callback(epoch.end)
        self._past, self._ending = [], []
        self._peers.clear()
        del self._epoch

    def _took_off(self, agent: str, handle: Any) -> int:
        """The ticket of something that our agent has begun with a peer's `agent`."""
        ticket = next(self._tickets)
        self._flights[ticket] = _Flight(handle, self._epoch, agent)
        return ticket

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Advance until `is_done`, or not for longer: whether it is."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                return False
            self._advance()
            time.sleep(_POLL_INTERVAL_S)
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectorError(f"connector {self._name} is closed")

    def _begun(self, epoch: int, name: str) -> AgentEpoch:
        return AgentEpoch(epoch, name, self.agent_class(name, self._memory), self.settle_s)

    def _epochs(self) -> list[AgentEpoch]:
        return [self._epoch, *self._past, *self._ending]

    def _check_at_rest(self, peer: str, agent: str) -> None:
        life = life_of(agent)
        others = self._in_use(life) - {agent}
        if others:
            raise ConnectorError(f"peer {peer}: what is under way with {min(others)} has not ended")

    def _in_use(self, life: str) -> set[str]:
        """Those agents of another connector with which something is under way."""
        agents = {flight.agent for flight in self._flights.values()}
        agents |= {one.warming.reading for one in self._epochs()}
        return {agent for agent in agents if life_of(agent) == life}

    def _advance(self, at_once: str = "") -> None:
        for epoch in self._epochs():
            epoch.advance()
        for ticket, flight in list(self._flights.items()):
            try:
                if not flight.epoch.agent.is_finished(flight.handle):
                    continue
            except ConnectorError as error:
                flight.error = flight.error or str(error)
            del self._flights[ticket]
            self._ended.append(TicketResult(ticket, flight.error))
        self._sweep(at_once)

    def _leave(self, name: str, reason: str) -> None:
        for flight in self._flights.values():
            if flight.agent == name:
                flight.error = flight.error or reason
        for epoch in self._epochs():
            epoch.leave(name)
        self._sweep()

    def _sweep(self, at_once: str = "") -> None:
        """Forget the peers' agents that are to go, and end our own that are, where no transfer
        uses them any more."""
        users: dict[AgentEpoch, set[str]] = {}
        for flight in self._flights.values():
            users.setdefault(flight.epoch, set()).add(flight.agent)
        for epoch in self._epochs():
            epoch.sweep(users.get(epoch, set()), at_once)
        for epoch in list(self._ending):
            if epoch not in users and epoch.is_settled and not epoch.warming.is_under_way:
                self._ending.remove(epoch)
                epoch.end()
