"""One life of a connector's agent: from one revocation to the next.

Facts relied on (nixl 1.5.1, UCX 1.23, two processes; measured):
- What a transport knows of a peer only grows, and each time that two living agents lose and meet
  each other it keeps a socket or two at either end; one, each time that it cannot reach a peer. All
  of it goes with the agent, where two live with either: so a new one is begun, and the old one
  ended once nobody uses it.
- An agent that ends under a peer's transfer over TCP takes its process along (SIGSEGV, 3 of 3
  runs). Under cross-memory attach the transfer goes on. So an agent whose users have not all let go
  is kept, however long that takes.
- UCX aborts the process where a connection is closed that is still being made ("stubs.c: Assertion
  `0' failed": twice in 3,096 faults at every state, both times right after a peer that had just
  been met was killed). So no agent is forgotten before SETTLE_S have passed since it was learnt.
- It does so, too, where a connection that both ends are making breaks (7 of 504 times that a peer
  was killed just after the meeting, over TCP; 3 in 3,168 faults at every state, on one host). So
  only the end that is likely to start transfers learns a peer ahead, the other when it has to.
- A new agent takes 25-75 ms, the first connection to each peer as long again.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import ConnectorError
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region
from kvxfer.transfer.warming import Warming

if TYPE_CHECKING:
    from kvxfer.transfer.agent import Agent

logger = logging.getLogger(__name__)

_EPOCH: Final = re.compile(r"\.e\d+$")

SETTLE_S = 1.0

Told = Sequence[bytes]
"""All metadata that a peer's agent was described by, oldest first."""


def agent_name(life: str, epoch: int) -> str:
    """What the agents of one connector are called: the first just as the connector."""
    return f"{life}.e{epoch}" if epoch else life


def life_of(agent: str) -> str:
    """The connector that an agent is, or was, one of."""
    return _EPOCH.sub("", agent)


@dataclass(eq=False)
class AgentEpoch:
    """Owns `agent`, its registrations, and what it knows of peers' agents."""

    number: int
    name: str
    agent: Agent
    settle_s: float = 0.0
    """How long a peer's agent is known at the least."""
    warming: Warming = field(default_factory=Warming)
    num_failed: int = 0
    """Times that a peer could not be learnt."""
    _handles: dict[Region, Any] = field(default_factory=dict)
    _known: dict[str, float] = field(default_factory=dict)
    """Peers' agents, and when they were learnt."""
    _leaving: set[str] = field(default_factory=set)
    """Of those, who are to be forgotten once no transfer uses them."""
    _coming: deque[tuple[RemotePeer, Told]] = field(default_factory=deque)
    """Peers of the agent before this one, to be learnt one a turn."""

    def register(self, regions: Sequence[Region]) -> None:
        """All of them, or ConnectorError and none."""
        handles = {}
        with ExitStack() as undo:
            for region in regions:
                handles[region] = self.agent.register(region)
                undo.callback(self.agent.deregister, handles[region])
            undo.pop_all()
        self._handles |= handles

    def deregister(self, regions: Sequence[Region]) -> None:
        """Those that it has."""
        with ExitStack() as release:
            for region in self._handles.keys() & set(regions):
                release.callback(self.agent.deregister, self._handles.pop(region))

    def learn(self, remote: RemotePeer, metadata: bytes) -> None:
        """Know more of a peer's agent. Raises ConnectorError and changes nothing."""
        try:
            self.agent.add_peer(remote, metadata)
        except ConnectorError:
            self.num_failed += 1
            raise
        self._known[remote.agent] = time.monotonic()
        self._leaving.discard(remote.agent)

    def expect(self, remote: RemotePeer, told: Told) -> None:
        """`advance` learns it, and reads ahead of what it has registered."""
        self._coming.append((remote, told))

    def knows(self, agent: str) -> bool:
        return agent in self._known

    def reach(self, remote: RemotePeer, told: Told) -> None:
        """Know the peer, at once, by all that was told. Raises ConnectorError: the next time it is
        learnt from the first word on."""
        if remote.agent in self._known and remote.agent not in self._leaving:
            return
        try:
            for metadata in told:
                self.learn(remote, metadata)
        except ConnectorError:
            self.leave(remote.agent)
            raise

    def advance(self) -> None:
        self.agent.progress()
        if self._coming:
            remote, told = self._coming.popleft()
            try:
                self.reach(remote, told)
            except ConnectorError as error:  # a transfer with it will say so again
                logger.warning("agent %s does not reach %s: %s", self.name, remote.agent, error)
            else:
                self.warming.add(remote, remote.regions.regions)
        self.warming.advance(self.agent)

    def forget(self, agent: str) -> None:
        """Begin nothing with a peer's agent any more."""
        self.warming.forget(agent)
        self._coming = deque(one for one in self._coming if one[0].agent != agent)

    def leave(self, agent: str) -> None:
        self.forget(agent)
        if agent in self._known:
            self._leaving.add(agent)

    def is_leaving(self, agent: str) -> bool:
        return agent in self._leaving

    def leaves_life(self, life: str) -> bool:
        return any(life_of(agent) == life for agent in self._leaving)

    def sweep(self, busy: set[str], at_once: str = "") -> None:
        """Have the agent forget those that are to go, but for those that transfers use; one that is
        about to be learnt again `at_once`."""
        settled_s = time.monotonic() - self.settle_s
        for agent in sorted(self._leaving - busy):
            is_settled = self._known[agent] <= settled_s or agent == at_once
            if is_settled and not self.warming.is_reading(agent):
                self._leaving.remove(agent)
                del self._known[agent]
                self.agent.remove_peer(agent)

    @property
    def is_settled(self) -> bool:
        """Whether no connection may still be being made."""
        return all(one <= time.monotonic() - self.settle_s for one in self._known.values())

    def rest(self) -> None:
        """Begin nothing any more: another epoch has begun, or the connector closes."""
        self.warming.forget_all()
        self._coming.clear()

    def end(self) -> None:
        """Undo all; the agent ends with the last reference to it. No transfer uses it."""
        with ExitStack() as release:
            for handle in self._handles.values():
                release.callback(self.agent.deregister, handle)
            for name in sorted(self._known):
                release.callback(self.agent.remove_peer, name)
        self._handles.clear()
        self._known.clear()
        self._leaving.clear()
