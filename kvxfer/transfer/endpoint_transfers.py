"""An endpoint's transfers under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from kvxfer.errors import BlocksInUse
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.endpoint_own import OwnMemory
from kvxfer.transfer.endpoint_remotes import Remotes
from kvxfer.transfer.endpoint_tickets import Selection, Ticket, plan_blocks
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.multi import MultiConnector


class Options(TypedDict, total=False):
    """What else `push` and `pull` take by name."""

    group: int
    """Of layers; default: the first. One transfer is within one group."""
    heads: range | None
    """In the model's numbers, of those that both sides hold; default: all of them."""
    lane: Lane | None
    """One that `connect` returned; default: the best of this direction."""


class Transfers:
    """Tickets by the connector's number, from submission to their end."""

    def __init__(self, connector: MultiConnector, own: OwnMemory, remotes: Remotes) -> None:
        self._connector = connector
        self._own = own
        self._remotes = remotes
        self._tickets: dict[int, Ticket] = {}

    def start(
        self,
        direction: Direction,
        peer: str,
        blocks: tuple[Sequence[int], Sequence[int]],
        what: Selection,
        options: Options,
    ) -> Ticket:
        push = direction is Direction.PUSH
        group = options.get("group", 0)
        ours, theirs = self._own.side(group), self._remotes.side(peer, group)
        lane = self._remotes.lane(peer, direction, options.get("lane"))
        ends = (ours, theirs) if push else (theirs, ours)
        plan = plan_blocks(*ends, blocks, what, options.get("heads"))
        number = self._connector.submit(peer, lane, plan)
        uses = group, frozenset(map(int, blocks[0 if push else 1]))
        self._tickets[number] = Ticket(self.poll, peer, lane, plan, uses)
        return self._tickets[number]

    def poll(self) -> list[Ticket]:
        ended = []
        for result in self._connector.poll():
            ticket = self._tickets.pop(result.ticket)
            ticket.end(result.error)
            ended.append(ticket)
        return ended

    def num_with(self, peer: str) -> int:
        return sum(ticket.peer == peer for ticket in self._tickets.values())

    def check_unused(self, bounds: Sequence[int]) -> None:
        """Raise BlocksInUse where blocks of ours from `bounds` on, group by group, are in use."""
        for ticket in self._tickets.values():
            group, blocks = ticket.uses
            above = [block for block in blocks if block >= bounds[group]]
            if above:
                raise BlocksInUse(bounds[group], len(above), 0, max(above))

    def abandon(self, reason: str) -> None:
        """Nobody polls any more."""
        for ticket in self._tickets.values():
            ticket.end(reason)
        self._tickets.clear()
