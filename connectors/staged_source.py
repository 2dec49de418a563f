"""The source's side of the staged way: pieces are gathered into outgoing slots and written.

    pending   →  gathering  →  writing  →  told

An outgoing slot is taken only for a piece that has a slot at the other end, so every piece that
has one gets on, whatever others wait for: there is no deadlock between rings.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from connectors.staged_link import Link, Links
from connectors.staged_messages import (
    MAX_TEXT,
    Ask,
    Grant,
    Landed,
    Offer,
    Refused,
    Return,
    Written,
    from_wire,
    to_wire,
)
from connectors.staged_messages import Piece as PieceMessage
from connectors.staged_site import Site
from connectors.staged_ticket import Ticket
from connectors.staging_plan import Nest, Piece
from kvxfer.errors import ConnectorError

_OVER = -2


@dataclass(slots=True, eq=False)
class _Shipment:
    """A piece on its way into `remote_slot`: of our own `push`, or asked for."""

    link: Link
    session: int
    """Ours with the peer: the slot is ours to write while it lasts."""
    ticket: int
    remote_slot: int
    size_bytes: int
    nests: tuple[Nest, ...]
    push: Ticket | None = None
    piece: Piece | None = None
    slot: int = -1
    """Ours, outgoing; `_OVER` at the end."""
    copy: Any = None
    write: Any = None

    @property
    def is_current(self) -> bool:
        return self.link.is_ready and self.link.session == self.session

    @property
    def is_gathering(self) -> bool:
        return self.copy is not None and self.write is None


class Source:
    """Outgoing slots, what lies in them, and our own pushes."""

    def __init__(self, site: Site, links: Links) -> None:
        self._site = site
        self._links = links
        self._free = deque(range(site.ring.num_slots))
        self._shipments: list[_Shipment] = []
        self._unoffered: list[Ticket] = []
        self._told: dict[tuple[Link, int], int] = {}
        """By slot at the other end, the ticket of a Piece that was not answered yet."""
        self.pushes: dict[int, Ticket] = {}

    def push(self, ticket: Ticket) -> None:
        self.pushes[ticket.number] = ticket
        self._unoffered.append(ticket)

    def handle(self, link: Link, message: Ask | Grant | Landed) -> None:
        """Raises ConnectorError for what no peer of ours says."""
        if isinstance(message, Landed):
            self._landed(link, message)
            return
        slot = message.slot
        if slot >= link.ring.num_slots or (link, slot) in self._told:
            raise ConnectorError(f"slot: {slot} is not free to be written")
        if any(s.link is link and s.is_current and s.remote_slot == slot for s in self._shipments):
            raise ConnectorError(f"slot: {slot} is being written already")
        if isinstance(message, Ask):
            self._asked(link, message)
        else:
            self._granted(link, message)

    def advance(self) -> list[Ticket]:
        """Get everything on as far as it goes; the pushes that ended."""
        for ticket in self._unoffered:
            if ticket.link.is_ready and ticket.error is None:
                self._offer(ticket)
        self._unoffered = [
            one for one in self._unoffered if not one.link.is_ready and one.error is None
        ]
        self._shipments = [one for one in self._shipments if not self._is_over(one)]
        ended = [ticket for ticket in self.pushes.values() if self._has_ended(ticket)]
        for ticket in ended:
            del self.pushes[ticket.number]
        return ended

    def lost(self, link: Link, reason: str) -> None:
        """The peer answers nothing of the link's session any more, nor may it be written to."""
        self._told = {key: number for key, number in self._told.items() if key[0] is not link}
        for ticket in self.pushes.values():
            if ticket.link is link:
                ticket.fail(reason)
                ticket.is_given_up = True

    def uses(self, link: Link) -> bool:
        ours = any(ticket.link is link for ticket in self.pushes.values())
        told = any(key[0] is link for key in self._told)
        return ours or told or any(one.link is link for one in self._shipments)

    def written_to(self) -> set[str]:
        """Agents into whose rings bytes are moving."""
        return {one.link.agent for one in self._shipments if one.write is not None}

    def copying(self) -> set[int]:
        """The ids of copies under way."""
        return {id(one) for one in self._shipments if one.is_gathering}

    @property
    def num_free(self) -> int:
        """Outgoing slots."""
        return len(self._free)

    @property
    def is_busy(self) -> bool:
        return bool(self._shipments or self.pushes)

    def _offer(self, ticket: Ticket) -> None:
        count = len(ticket.pieces)
        self._links.send(ticket.link, lambda to: Offer(to, ticket.number, count))

    def _asked(self, link: Link, ask: Ask) -> None:
        try:
            if self._site.is_closing:
                raise ConnectorError("the source is closing")
            if ask.size_bytes > min(self._site.ring.slot_bytes, link.ring.slot_bytes):
                raise ConnectorError(f"size_bytes: {ask.size_bytes} do not fit a slot")
            nests = from_wire(ask.sources, ask.size_bytes, self._site.memory.size_bytes)
        except ConnectorError as error:
            self._refuse(link, ask.ticket, ask.slot, str(error))
            return
        self._shipments.append(
            _Shipment(link, link.session, ask.ticket, ask.slot, ask.size_bytes, nests)
        )

    def _granted(self, link: Link, grant: Grant) -> None:
        ticket = self.pushes.get(grant.ticket)
        if ticket is None or ticket.link is not link or not ticket.has_more:
            self._return(link, grant.ticket, grant.slot)
            return
        piece = ticket.take()
        sizes = piece.size_bytes, piece.sources()
        self._shipments.append(
            _Shipment(link, link.session, ticket.number, grant.slot, *sizes, ticket, piece)
        )

    def _landed(self, link: Link, landed: Landed) -> None:
        number = self._told.pop((link, landed.slot), None)
        if number != landed.ticket:
            raise ConnectorError(f"slot: {landed.slot} holds no piece of ticket {landed.ticket}")
        ticket = self.pushes.get(number)
        if ticket is not None:
            ticket.ended(self._site.clock(), landed.error)

    def _is_over(self, one: _Shipment) -> bool:
        """Get a shipment on as far as it goes."""
        if one.copy is None and not self._has_begun(one):
            return one.slot == _OVER
        if one.write is None and not self._has_gathered(one):
            return one.slot == _OVER
        try:
            if not self._site.agent.is_written(one.write):
                return False
        except ConnectorError as error:
            self._end(one, str(error))
            self._links.fail(one.link, str(error))
        else:
            self._end(one, None)
        return True

    def _has_begun(self, one: _Shipment) -> bool:
        if not one.is_current or (one.push is not None and one.push.error):
            self._end(one, "it was given up")
        elif self._free and self._has_share_left(one.link):
            known = one.push.regions if one.push is not None else None
            one.slot = self._free.popleft()
            try:
                one.copy = self._site.gather(one.nests, one.slot, known)
            except ConnectorError as error:
                self._end(one, str(error))
        return one.copy is not None

    def _has_share_left(self, link: Link) -> bool:
        """A peer that is stopped, and whose bytes stay in flight, does not keep all slots."""
        held = sum(one.link is link and one.slot >= 0 for one in self._shipments)
        return held < self._site.ring.share

    def _has_gathered(self, one: _Shipment) -> bool:
        site = self._site
        try:
            if not site.copier.is_finished(one.copy):
                return False
        except ConnectorError as error:
            self._end(one, str(error))
            return False
        if not one.is_current:
            self._end(one, "it was given up")
            return False
        target = one.link.ring.incoming(one.remote_slot)
        try:
            one.write = site.agent.write(
                site.ring.outgoing(one.slot), one.link.remote, target, one.size_bytes
            )
        except ConnectorError as error:
            self._end(one, str(error))
            self._links.fail(one.link, str(error))
        return one.write is not None

    def _end(self, one: _Shipment, error: str | None) -> None:
        """Its slot is free, and the peer is told what its own is worth."""
        if one.slot >= 0:
            self._free.append(one.slot)
        one.slot = _OVER
        link, push = one.link, one.push
        if push is not None and error is None:
            error = push.error  # what is told now would be scattered
        if push is not None and (error or not one.is_current):
            push.ended(self._site.clock(), error or "it was given up")
        if not one.is_current:
            return
        if push is None and error is None:
            self._links.send(link, lambda to: Written(to, one.ticket, one.remote_slot))
        elif push is None:
            self._refuse(link, one.ticket, one.remote_slot, error or "")
        elif error is None:
            self._tell(one)
        else:
            self._return(link, one.ticket, one.remote_slot)

    def _tell(self, one: _Shipment) -> None:
        piece = one.piece
        if piece is None:
            return
        nests = to_wire(piece.destinations())
        self._told[one.link, one.remote_slot] = one.ticket
        self._links.send(
            one.link,
            lambda to: PieceMessage(to, one.ticket, one.remote_slot, one.size_bytes, nests),
        )

    def _refuse(self, link: Link, ticket: int, slot: int, error: str) -> None:
        self._links.send(link, lambda to: Refused(to, ticket, slot, error[:MAX_TEXT]))

    def _return(self, link: Link, ticket: int, slot: int) -> None:
        self._links.send(link, lambda to: Return(to, ticket, slot))

    def _has_ended(self, ticket: Ticket) -> bool:
        if ticket.is_complete or (ticket.error is not None and not ticket.under_way):
            return True
        if not ticket.is_given_up:
            return False
        return not any(one.push is ticket and one.is_gathering for one in self._shipments)
