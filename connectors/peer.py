"""Same host, pull only: the importer maps the owner's pages and copies out of them.

Descriptors of the owner's chunks travel over a Unix socket (`handover_socket`); all chunks of an
owner are mapped into one range of the importer's, at their own offsets, for reading only where the
driver can. Nothing else is shared: each side may live in PID, network and IPC namespaces of its
own and see no GPU but its own (CUDA_VISIBLE_DEVICES).

What this relies on, and what follows:
- A chunk is physical memory of its own, alive for as long as it is mapped anywhere (the drivers'
  files say how that was checked). An importer that is stale, or stopped, keeps the pages that it
  had and nothing else: it cannot touch what is at those addresses of the owner now, cannot crash
  the owner, and is not crashed by it. The memory is free once the importer lets go or ends.
- The owner unmaps after its peers have said that they did (`renew`). One that has not only costs
  the memory.
- An owner's end closes its socket: its importers' transfers end with an error, and its pages go.
- Who knows a token may map: tokens travel over the authenticated control plane, serve once and
  end after a minute, and the socket's directory is closed to other users.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar, cast

from connectors.peer_agent import PeerAgent
from kvxfer.errors import ConnectorError
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import Description, learn


class PeerConnector(AgentConnector):
    """Moves bytes out of a peer's pages."""

    agent_class = PeerAgent
    renews_agent = False  # a stale importer keeps pages, and reaches nothing
    directions: ClassVar[frozenset[Direction]] = frozenset({Direction.PULL})

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """The copier is the agent's own, and stays."""
        self._peer_agent().copier.warm_up()
        return ExitStack()

    def invite(self) -> bytes:
        return self._peer_agent().exporter.invitations.issue()

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        agent = self._peer_agent()
        known = self._peers.get(peer)
        if known is not None and agent.has_lost(known.agent):
            self.disconnect(peer)  # nothing of it is mapped any more: it is learnt from the start
        with agent.invited_with(invitation):
            super().connect(peer, base_address, description)

    def renew(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """Over the same connection. When it raises, the peer is disconnected."""
        agent = self._peer_agent()
        known = self._peers.get(peer)
        try:
            told = Description.from_bytes(description)
            if known is None or known.agent != told.agent or agent.has_lost(known.agent):
                self.disconnect(peer)
                self.connect(peer, base_address, description, invitation)
                return
            others = {name: other for name, other in self._peers.items() if name != peer}
            learnt = learn(others, self._name, peer, base_address, told)
            agent.renew_peer(learnt, told.transport)
        except ConnectorError:
            self.disconnect(peer)
            raise
        self._peers[peer] = learnt

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        if direction is not Direction.PULL:
            raise ConnectorError(f"peer: direction {direction}: it only pulls")
        return super().submit(peer, direction, plan)

    def close(self) -> None:
        if self._is_closed:
            return
        peer_agent = self._peer_agent()
        with ExitStack() as release:
            release.callback(peer_agent.close)
            for known in self._peers.values():
                peer_agent.lose(known.agent, "it was closed")
            super().close()

    def _leave(self, name: str, reason: str) -> None:
        """Also: what can end at once does, and the agent is not served any more."""
        peer_agent = self._peer_agent()
        peer_agent.lose(name, reason)
        peer_agent.exporter.forget(name)
        super()._leave(name, reason)

    def _peer_agent(self) -> PeerAgent:
        self._check_open()
        return cast(PeerAgent, self._epoch.agent)


CONNECTOR = PeerConnector
