"""The destination's side of the staged way: slots are given out, and scattered once written.

    free  →  out (asked or granted)  →  landing  →  free

A slot that is out belongs to the peer until it answers, or can no longer reach us.
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
    Piece,
    Refused,
    Return,
    Written,
    from_wire,
    to_wire,
)
from connectors.staged_site import Site
from connectors.staged_ticket import Ticket
from connectors.staging_plan import Nest
from kvxfer.errors import ConnectorError

LEASE_S = 10.0
"""A piece is scattered only if it came so soon after its grant: by the time the source gives up
waiting for the answer (see `staged_engine.SILENCE_S`), nothing of it can begin any more."""
_MAX_OFFERS = 4096
"""Of one peer."""


@dataclass(slots=True, eq=False)
class _Guest:
    """What a peer wants to push."""

    link: Link
    session: int
    ticket: int
    pieces_left: int

    @property
    def has_more(self) -> bool:
        is_current = self.link.is_ready and self.link.session == self.session
        return is_current and self.pieces_left > 0


@dataclass(slots=True, eq=False)
class _Slot:
    """One that is not free."""

    index: int
    link: Link
    session: int
    ticket: int
    since_s: float
    pull: Ticket | None = None
    """Our own that it was asked for; None where a peer pushes."""
    nests: tuple[Nest, ...] = ()
    """Where its bytes belong."""
    copy: Any = None


class Target:
    """Incoming slots, who has them, and our own pulls."""

    def __init__(self, site: Site, links: Links) -> None:
        self._site = site
        self._links = links
        self._free = deque(range(site.ring.num_slots))
        self._out: dict[int, _Slot] = {}
        self._landing: list[_Slot] = []
        self._wants: deque[Ticket | _Guest] = deque()
        self._guests: dict[tuple[Link, int], _Guest] = {}
        self.pulls: dict[int, Ticket] = {}

    def pull(self, ticket: Ticket) -> None:
        self.pulls[ticket.number] = ticket
        self._wants.append(ticket)

    def handle(self, link: Link, message: Offer | Written | Refused | Piece | Return) -> None:
        """Raises ConnectorError for what no peer of ours says."""
        if isinstance(message, Offer):
            self._offered(link, message)
            return
        is_grant = isinstance(message, Piece | Return)
        slot = self._out.get(message.slot)
        if slot is None or slot.link is not link or slot.ticket != message.ticket:
            raise ConnectorError(f"slot: {message.slot} is not out for ticket {message.ticket}")
        if (slot.pull is None) != is_grant:
            raise ConnectorError(f"slot: {message.slot} was not given out for that")
        del self._out[slot.index]
        if isinstance(message, Written):
            self._written(slot)
        elif isinstance(message, Piece):
            self._arrived(slot, message)
        elif isinstance(message, Refused):
            self._end(slot, message.error or "it was refused")
        else:
            self._dismiss(link, message.ticket)
            self._free.append(slot.index)

    def advance(self) -> list[Ticket]:
        """Get everything on as far as it goes; the pulls that ended."""
        self._landing = [slot for slot in self._landing if not self._has_landed(slot)]
        if self._site.is_closing:
            self._wants.clear()
            self._guests.clear()
        while self._free and self._give_out():
            pass
        ended = [ticket for ticket in self.pulls.values() if self._has_ended(ticket)]
        for ticket in ended:
            del self.pulls[ticket.number]
        return ended

    def lost(self, link: Link, reason: str) -> None:
        """The peer writes into none of our slots any more."""
        for slot in [slot for slot in self._out.values() if slot.link is link]:
            del self._out[slot.index]
            self._free.append(slot.index)
            if slot.pull is not None:
                slot.pull.ended(self._site.clock(), reason)
        for _, ticket in [key for key in self._guests if key[0] is link]:
            self._dismiss(link, ticket)
        for pull in self.pulls.values():
            if pull.link is link:
                pull.fail(reason)

    def uses(self, link: Link) -> bool:
        slots = any(slot.link is link for slot in (*self._out.values(), *self._landing))
        guests = any(key[0] is link for key in self._guests)
        return slots or guests or any(one.link is link for one in self.pulls.values())

    def copying(self) -> set[int]:
        """The ids of copies under way."""
        return {id(slot) for slot in self._landing}

    @property
    def is_busy(self) -> bool:
        return bool(self._out or self._landing or self.pulls or self._guests)

    @property
    def num_free(self) -> int:
        """Incoming slots."""
        return len(self._free)

    def _offered(self, link: Link, offer: Offer) -> None:
        key = link, offer.ticket
        if key in self._guests or sum(one[0] is link for one in self._guests) >= _MAX_OFFERS:
            raise ConnectorError(f"ticket: {offer.ticket} is offered twice, or one too many")
        guest = _Guest(link, link.session, offer.ticket, offer.num_pieces)
        self._guests[key] = guest
        self._wants.append(guest)

    def _written(self, slot: _Slot) -> None:
        pull = slot.pull
        if pull is None or pull.error is not None:
            self._end(slot, "its ticket ended")
        else:
            self._land(slot)

    def _arrived(self, slot: _Slot, piece: Piece) -> None:
        site = self._site
        try:
            if site.clock() - slot.since_s > LEASE_S:
                raise ConnectorError(f"the piece came more than {LEASE_S:g} s after its grant")
            if piece.size_bytes > min(site.ring.slot_bytes, slot.link.ring.slot_bytes):
                raise ConnectorError(f"size_bytes: {piece.size_bytes} do not fit a slot")
            slot.nests = from_wire(piece.destinations, piece.size_bytes, site.memory.size_bytes)
        except ConnectorError as error:
            self._end(slot, str(error))
        else:
            self._land(slot)

    def _land(self, slot: _Slot) -> None:
        known = slot.pull.regions if slot.pull is not None else None
        try:
            slot.copy = self._site.scatter(slot.nests, slot.index, known)
        except ConnectorError as error:
            self._end(slot, str(error))
        else:
            self._landing.append(slot)

    def _has_landed(self, slot: _Slot) -> bool:
        try:
            if not self._site.copier.is_finished(slot.copy):
                return False
        except ConnectorError as error:
            self._end(slot, str(error))
        else:
            self._end(slot, None)
        return True

    def _end(self, slot: _Slot, error: str | None) -> None:
        """The slot is free; whoever has the ticket is told."""
        self._free.append(slot.index)
        if slot.pull is not None:
            slot.pull.ended(self._site.clock(), error)
            return
        if error:
            self._dismiss(slot.link, slot.ticket)
        if slot.link.session == slot.session:
            text = (error or "")[:MAX_TEXT]
            self._links.send(slot.link, lambda to: Landed(to, slot.ticket, slot.index, text))

    def _dismiss(self, link: Link, ticket: int) -> None:
        """A peer's push gets no more slots."""
        guest = self._guests.pop((link, ticket), None)
        if guest is not None:
            guest.pieces_left = 0

    def _give_out(self) -> bool:
        """One slot to each that wants some; whether there was one."""
        given = False
        for _ in range(len(self._wants)):
            if not self._free:
                break
            want = self._wants.popleft()
            if self._may_have(want):
                self._give(want)
                given = True
            if want.has_more:
                self._wants.append(want)
        return given

    def _may_have(self, want: Ticket | _Guest) -> bool:
        """A peer that falls silent does not keep all slots."""
        link = want.link
        held = sum(slot.link is link for slot in self._out.values())
        return want.has_more and link.is_ready and held < self._site.ring.share

    def _give(self, want: Ticket | _Guest) -> None:
        link, now_s = want.link, self._site.clock()
        slot = _Slot(self._free.popleft(), link, link.session, 0, now_s)
        self._out[slot.index] = slot
        if isinstance(want, _Guest):
            slot.ticket = want.ticket
            want.pieces_left -= 1
            if not want.pieces_left:
                self._guests.pop((link, want.ticket), None)
            self._links.send(link, lambda to: Grant(to, slot.ticket, slot.index))
        else:
            piece = want.take()
            slot.ticket, slot.pull, slot.nests = want.number, want, piece.destinations()
            sources = to_wire(piece.sources())
            size_bytes = piece.size_bytes
            self._links.send(link, lambda to: Ask(to, slot.ticket, slot.index, size_bytes, sources))

    def _has_ended(self, ticket: Ticket) -> bool:
        if ticket.is_complete:
            return True
        return ticket.error is not None and not any(slot.pull is ticket for slot in self._landing)
