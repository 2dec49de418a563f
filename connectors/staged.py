"""NIXL over a small ring of fixed memory: gather, one large transfer, scatter, many pieces at once.

    cache → gather → outgoing slot  ⇒ NIXL WRITE ⇒  incoming slot → scatter → cache

Why, measured on two H200s: NIXL pulls growable GPU memory at 250–300 GB/s and pushes it at 0.5; on
fixed memory both run at 300–385. And a descriptor costs 0.1–6 µs, which a copy of boxes does not
know of: unequal layouts, block sizes or tensor-parallel sizes make very many small runs.

The bytes are always written by the source, for a pull too, since over TCP a WRITE is 2–4 times as
fast as a READ. Only the ring is registered with NIXL. So growth and shrinking do not concern the
transport, and a stale peer reaches nothing but the ring: what a peer asks for is checked against
the regions that are registered at that moment.

Facts relied on (connectors/nixl.py, kvxfer/transfer/agent_connector.py):
- A WRITE that is DONE is at the target, so what is said afterwards is said of bytes that are there.
- A transfer that was posted cannot be stopped, so a slot in flight is not used again until its
  transfer ended; one that a peer may write into, not until it has answered or cannot reach us.
- Who is stopped says nothing, and may go on later. A push that is given up for silence ends after
  SILENCE_S; its peer scatters nothing that comes more than LEASE_S after it granted the slot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Final

from connectors.staged_agent import StagedAgent
from connectors.staged_engine import Engine
from connectors.staged_link import seal_ring, unseal_ring
from connectors.staged_ticket import Ticket
from connectors.staging_plan import piece_bytes, pieces_of
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
from kvxfer.transfer.regions import Region

_SPIN_S: Final = {"cpu": 0.0, "cuda": 0.0005}
"""A poll looks again for so long while something is under way: a piece of 64 MiB takes 175 µs over
NVLink. On the host the peer needs the core."""


class StagedConnector(Connector):
    """Moves bytes through rings, in either direction."""

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        self._name = f"{agent_name}.staged"  # NIXL's own connector has an agent of the other name
        self._memory = memory
        self._peers: dict[str, RemotePeer] = {}
        self._tickets = count(1)
        self._ended: list[TicketResult] = []
        self._spin_s = _SPIN_S.get(memory.device.partition(":")[0], 0.0)
        self._engine: Engine | None = Engine(self._name, memory)

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """The ring and the copy kernels are there already, and stay; two agents more move
        something."""
        self._open().site.copier.warm_up()
        with ExitStack() as undo:
            exercise_pair(StagedAgent, f"{self._name}.scratch", scratch, undo)
            return undo.pop_all()

    def register(self, regions: Sequence[Region]) -> None:
        site = self._open().site
        site.regions = extend(site.regions, regions, self._memory.size_bytes)

    def deregister(self, regions: Sequence[Region]) -> None:
        """When this returns, none of our copies touches `regions`, whoever asked for it. Raises
        ConnectorError where some did not end in 5 s; the ranges are forgotten even so."""
        engine = self._open()
        engine.site.regions = shrink(engine.site.regions, regions)
        self._record(engine.settle())

    def describe(self, regions: Sequence[Region]) -> bytes:
        site = self._open().site
        check_registered(site.regions, regions)
        return Description(
            agent=self._name,
            device=self._memory.device,
            regions=[(region.offset, region.size) for region in regions],
            transport=seal_ring(site.ring),
        ).to_bytes()

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        engine = self._open()
        told = Description.from_bytes(description)
        learnt = learn(self._peers, self._name, peer, base_address, told)
        ring = unseal_ring(told.transport)
        if ring.agent != learnt.agent:
            raise ConnectorError(f"agent {learnt.agent} describes the ring of {ring.agent}")
        engine.links.sweep(engine.source.written_to())
        link = engine.links.open(ring)
        if not link.is_ready:
            engine.links.greet(link)
        if link.failure is not None:
            raise ConnectorError(f"agent {learnt.agent} is out of reach: {link.failure}")
        link.is_wanted = True
        known = self._peers.get(peer)
        self._peers[peer] = learnt
        if known is not None and known.agent != learnt.agent:
            self._leave(engine, known.agent, f"peer {peer} is agent {learnt.agent} now")

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        engine = self._open()
        site, remote = engine.site, self._peers.get(peer)
        link = engine.links.find(remote.agent) if remote is not None else None
        if remote is None or link is None:
            raise ConnectorError(f"peer {peer} is not connected")
        check_plan(plan, direction, site.regions, remote.regions)
        slot_bytes = min(site.ring.slot_bytes, link.ring.slot_bytes)
        num_slots = min(site.ring.num_slots, link.ring.num_slots)
        limit = piece_bytes(plan.boxes, slot_bytes, num_slots)
        pieces = list(pieces_of(plan.boxes, limit))
        if link.remote_session is None:
            engine.links.greet(link)
        if link.failure is not None:
            raise ConnectorError(f"peer {peer} was lost: {link.failure}")
        number = next(self._tickets)
        ticket = Ticket(number, link, pieces, site.regions, time.monotonic())
        if not pieces:
            self._ended.append(TicketResult(number))
        elif direction is Direction.PUSH:
            engine.source.push(ticket)
        else:
            engine.target.pull(ticket)
        return number

    def poll(self) -> list[TicketResult]:
        """On a GPU it looks again for up to half a millisecond while something is under way."""
        engine = self._open()
        self._record(engine.advance())
        until = time.monotonic() + self._spin_s
        while engine.is_busy and not self._ended and time.monotonic() < until:
            self._record(engine.advance())
        ended, self._ended = self._ended, []
        return ended

    @property
    def is_busy(self) -> bool:
        """Whether a peer, or a ticket of ours, waits for what `poll` does: then no long pauses."""
        return self._engine is not None and self._engine.is_busy

    def disconnect(self, peer: str) -> None:
        """The peer's tickets end, in an error, when their bytes are at rest on both sides: a pull
        at the next poll, a push when the peer has answered, fallen silent or gone."""
        engine = self._open()
        remote = self._peers.pop(peer, None)
        if remote is not None:
            self._leave(engine, remote.agent, f"peer {peer} was disconnected")

    def close(self) -> None:
        """Waits up to 5 s for what is under way, here and at peers.

        Raises ConnectorError when a copy or a transfer of ours did not end: the cache's memory must
        stay mapped for the rest of the process. The ring stays where a peer may still write.
        """
        engine, self._engine = self._engine, None
        self._peers.clear()
        if engine is not None:
            engine.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise ConnectorError(f"connector {self._name} is closed")
        return self._engine

    def _record(self, ended: Sequence[Ticket]) -> None:
        self._ended += [TicketResult(ticket.number, ticket.error) for ticket in ended]

    def _leave(self, engine: Engine, agent: str, reason: str) -> None:
        link = engine.links.find(agent)
        if link is None:
            return
        for ticket in engine.tickets():
            if ticket.link is link:
                ticket.fail(reason)
        link.is_wanted = False
        if link.failure is not None:
            engine.links.leave(link)


CONNECTOR = StagedConnector
