"""What a staged connector runs on: its ring, its agent, both sides of transfers, and deadlines."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from connectors.peer_copy import copier_for
from connectors.staged_agent import StagedAgent
from connectors.staged_link import LINGER_S, Link, Links
from connectors.staged_messages import Ask, Grant, Landed, Ring
from connectors.staged_ring import RingMemory, ring_shape
from connectors.staged_site import Site
from connectors.staged_source import Source
from connectors.staged_target import Target
from connectors.staged_ticket import Ticket
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region, RegionSet

logger = logging.getLogger(__name__)

SILENCE_S = 15.0
"""A peer that says nothing for so long is not waited for any more."""
PROGRESS_S = 60.0
"""... nor one that talks, but does not get a ticket on."""
CLOSE_TIMEOUT_S = 5.0
SETTLE_TIMEOUT_S = 5.0
_POLL_INTERVAL_S: Final = 0.0005
_LOOK_INTERVAL_S: Final = 0.05
_ABANDONED: list[object] = []
"""What a peer, or a transfer that did not end, may still touch."""


class Engine:
    """Lives as long as its connector is open. Tickets that `advance` returns are over."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        shape = ring_shape(memory.device, os.environ)
        whole = Region(0, shape.total_bytes)
        self._ring_memory = RingMemory(memory.device, whole.size)
        window = self._ring_memory.window
        agent = StagedAgent(name, window)
        self._registration = agent.register(whole)
        metadata = agent.metadata([whole])
        place = name, memory.device, window.base_address
        ring = Ring(*place, shape.slot_bytes, shape.num_slots, metadata)
        copier = copier_for(memory.device)
        self.site = Site(memory, ring, agent, copier, time.monotonic, RegionSet())
        self.links = Links(agent, ring, time.monotonic, self._lost)
        self.source = Source(self.site, self.links)
        self.target = Target(self.site, self.links)
        self._looked_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self.source.is_busy or self.target.is_busy

    def tickets(self) -> list[Ticket]:
        """Those of ours that have not ended."""
        return [*self.source.pushes.values(), *self.target.pulls.values()]

    def advance(self) -> list[Ticket]:
        """Hear what peers say and get everything on as far as it goes, without waiting."""
        self.site.copier.begin_turn()
        self.site.agent.progress()
        for link, message in self.links.receive():
            try:
                if isinstance(message, ConnectorError):
                    raise message
                if isinstance(message, Ask | Grant | Landed):
                    self.source.handle(link, message)
                else:
                    self.target.handle(link, message)
            except ConnectorError as error:
                self._mistrust(link, error)
        ended = [*self.source.advance(), *self.target.advance()]
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_INTERVAL_S:
            self._looked_s = now_s
            self._look_after_links(now_s)
        self.links.flush()
        return ended

    def settle(self) -> list[Ticket]:
        """Return when the copies that are under way now have ended. Raises ConnectorError where
        that takes more than 5 s."""
        begun, ended = self._copying(), []
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while begun & self._copying():
            if time.monotonic() > deadline:
                raise ConnectorError(f"copies did not end in {SETTLE_TIMEOUT_S:g} s")
            ended += self.advance()
        return ended

    def close(self) -> None:
        """As `StagedConnector.close`. Nothing else is called afterwards."""
        self.site.is_closing = True
        for ticket in self.tickets():
            ticket.fail("the connector was closed")
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self.is_busy and time.monotonic() < deadline:
            self.advance()
            time.sleep(_POLL_INTERVAL_S)
        if self.is_busy:
            _ABANDONED.append(self)
        if self._copying() or self.source.written_to():
            raise ConnectorError(
                f"agent {self.site.ring.agent}: transfers did not end in {CLOSE_TIMEOUT_S:g} s; "
                f"the memory must stay mapped"
            )
        for link in self.links.all():
            self.links.leave(link)
        self.links.sweep(set())
        if self.is_busy:
            logger.warning("agent %s: peers did not give back all slots", self.site.ring.agent)
        else:
            self.site.agent.deregister(self._registration)

    def _look_after_links(self, now_s: float) -> None:
        """Who is awaited is asked for a sign of life, and not awaited for ever."""
        for ticket in self.tickets():
            heard_s = max(ticket.link.heard_s, ticket.moved_s)
            if now_s - heard_s > SILENCE_S:
                ticket.fail(f"agent {ticket.link.agent} has said nothing for {SILENCE_S:g} s")
                ticket.is_given_up = True
            elif now_s - ticket.moved_s > PROGRESS_S:
                ticket.fail(f"agent {ticket.link.agent} moved nothing in {PROGRESS_S:g} s")
                ticket.is_given_up = True
        for link in self.links.all():
            if self.source.uses(link) or self.target.uses(link):
                self.links.probe(link)
            elif not link.is_wanted and now_s - link.used_s > LINGER_S:
                self.links.leave(link)
        self.links.sweep(self.source.written_to())

    def _mistrust(self, link: Link, error: ConnectorError) -> None:
        """A message that no peer of ours sends: its tickets fail, and only those."""
        logger.warning("agent %s said what is refused: %s", link.agent, error)
        for ticket in self.tickets():
            if ticket.link is link:
                ticket.fail(f"agent {link.agent} said what is refused: {error}")

    def _lost(self, link: Link, reason: str) -> None:
        self.source.lost(link, reason)
        self.target.lost(link, reason)

    def _copying(self) -> set[int]:
        return self.source.copying() | self.target.copying()
