"""One transfer of ours over the staged way."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.staged_link import Link
from connectors.staging_plan import Piece
from kvxfer.transfer.regions import RegionSet


@dataclass(slots=True, eq=False)
class Ticket:
    """`pieces` in order: of those before `next_piece` some are `under_way`, the others have ended,
    `num_done` of them well."""

    number: int
    link: Link
    pieces: list[Piece]
    regions: RegionSet
    """Of ours, which the plan was checked against."""
    moved_s: float
    """When it last got on."""
    next_piece: int = 0
    under_way: int = 0
    num_done: int = 0
    error: str | None = None
    """Once set, nothing more is begun."""
    is_given_up: bool = False
    """The peer's answers are waited for no longer."""

    def fail(self, reason: str) -> None:
        self.error = self.error or reason

    @property
    def has_more(self) -> bool:
        return self.error is None and self.next_piece < len(self.pieces)

    def take(self) -> Piece:
        """The next piece, which is under way from now on."""
        piece = self.pieces[self.next_piece]
        self.next_piece += 1
        self.under_way += 1
        return piece

    def ended(self, now_s: float, error: str | None = None) -> None:
        """A piece that was under way is so no more."""
        self.under_way -= 1
        self.moved_s = now_s
        if error:
            self.fail(error)
        else:
            self.num_done += 1

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.num_done == len(self.pieces)
