"""The transfers that a worker started lately, for whoever looks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.control.view_messages import MAX_TRANSFERS
from kvxfer.telemetry.trace import now_ns
from kvxfer.transfer.lanes import Lane

if TYPE_CHECKING:
    from kvxfer.worker.transfer_thread import Movement


@dataclass(slots=True)
class LoggedTransfer:
    number: int
    peer: str
    """Its key."""
    lane: Lane
    start_ns: int
    end_ns: int = 0
    num_bytes: int = 0
    error: str = ""


class TransferLog:
    """Control thread only. Bounded, but for what is under way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[LoggedTransfer] = deque(maxlen=MAX_TRANSFERS)
        self._under_way: dict[int, LoggedTransfer] = {}
        self.num_ended = 0
        self.num_bytes = 0
        """Of those that ended without an error."""

    def began(self, peer: str, lane: Lane) -> LoggedTransfer:
        """What `ended` is to be told."""
        one = LoggedTransfer(next(self._numbers), peer, lane, now_ns())
        self._under_way[one.number] = one
        return one

    def ended(self, one: LoggedTransfer, movement: Movement) -> None:
        """Once for each."""
        del self._under_way[one.number]
        one.start_ns, one.end_ns = movement.start_ns, movement.end_ns
        one.error = movement.error or ""
        one.num_bytes = movement.num_bytes
        self.num_ended += 1
        if not one.error:
            self.num_bytes += movement.num_bytes
        self._recent.append(one)

    def newest(self, most_under_way: int) -> Iterator[LoggedTransfer]:
        """Those that ended last, then the oldest of those under way."""
        yield from self._recent
        yield from itertools.islice(self._under_way.values(), most_under_way)
