"""The side of `offload` that connects, and what it moves over a connection, parcel by parcel.

push   hold in a slot of ours ─→ `Load` ─→ the peer's thread reads the slot ─→ `Loaded`
pull   `Store` ─→ the peer's thread fills a slot of its own ─→ `Stored` ─→ ours reads it ─→ `Taken`
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from connectors.handover_socket import Dialling
from connectors.offload_mover import Mover
from connectors.offload_parcels import Extents
from connectors.offload_store import BlockStore, Held
from connectors.offload_wire import (
    Failed,
    Frame,
    Load,
    Loaded,
    Open,
    Store,
    Stored,
    Taken,
    Welcome,
    Wire,
)
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction

DIAL_TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 60.0
"""For how long a peer may do nothing about a parcel."""
WINDOW: Final = 8
"""Parcels of a connector's transfers to one peer that are under way at once."""


@dataclass(slots=True, eq=False)
class _Parcel:
    """One on its way: a thread has it (`future`), or else the peer."""

    transfer: Transfer
    src: Extents
    dst: Extents
    future: Future[Any] | None = None
    held: Held | None = None
    deadline_s: float = 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    """A ticket's parcels: those to come, and how many are under way. `failure` ends it once none
    is."""

    direction: Direction
    parcels: Callable[[], Iterator[tuple[Extents, Extents]]]
    coming: Iterator[tuple[Extents, Extents]] | None = None
    is_all_begun: bool = False
    num_under_way: int = 0
    failure: str = ""

    def next(self) -> tuple[Extents, Extents] | None:
        if self.failure:
            return None
        if self.coming is None:
            self.coming = self.parcels()
        return next(self.coming, None)

    def is_finished(self) -> bool:
        """Raises ConnectorError when it ended badly, and nothing of it moves any more."""
        if self.num_under_way or not (self.failure or self.is_all_begun):
            return False
        if self.failure:
            raise ConnectorError(self.failure)
        return True


@dataclass(slots=True, eq=False)
class Link:
    """A connection to one agent. `failure` is None, or why nothing more goes over it."""

    wire: Wire
    dialling: Dialling
    store: BlockStore
    mover: Mover
    failure: str | None = None
    deadline_s: float = 0.0
    """In which the other side has to welcome us."""
    is_connected: bool = False
    transfers: deque[Transfer] = field(default_factory=deque)
    parcels: dict[int, _Parcel] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def dial(
        cls, directory: Path, socket_name: str, opening: Open, store: BlockStore, mover: Mover,
        tiers: list[int],
    ) -> Link:  # fmt: skip
        """Raises ConnectorError when nobody listens."""
        with ExitStack() as undo:
            dialling = Dialling(directory, socket_name)
            undo.callback(dialling.socket.close)
            is_connected = dialling.attempt()
            undo.pop_all()
        link = cls(Wire(dialling.socket), dialling, store, mover, is_connected=is_connected)
        link.deadline_s = time.monotonic() + DIAL_TIMEOUT_S
        link.wire.say(opening, tiers)
        return link

    @property
    def is_at_rest(self) -> bool:
        return not self.parcels

    def start(self, transfer: Transfer) -> Transfer:
        self.transfers.append(transfer)
        return transfer

    def advance(self) -> None:
        """Raises nothing: what goes wrong loses the link."""
        try:
            if self.failure is None:
                self._talk()
        except ConnectorError as error:
            self.lose(str(error))
        for number, parcel in list(self.parcels.items()):
            if parcel.future is not None and parcel.future.done():
                self._carried(number, parcel)
        if self.failure is None:
            self._begin()
            self._flush()

    def lose(self, reason: str) -> None:
        """Hang up, for good: all that was to move over it has failed."""
        if self.failure is None:
            self.failure = reason
            self.wire.hang_up()
        for transfer in self.transfers:
            transfer.failure = transfer.failure or f"the connection was lost: {reason}"
        self.transfers.clear()
        for number, parcel in list(self.parcels.items()):
            parcel.transfer.failure = parcel.transfer.failure or f"lost: {reason}"
            if parcel.future is None or parcel.future.cancel():
                self._end(number, parcel)

    def close(self) -> None:
        """Of a lost link at rest. Idempotent."""
        self.wire.close()

    def _talk(self) -> None:
        now = time.monotonic()
        self.is_connected = self.is_connected or self.dialling.attempt()
        if self.is_connected:
            self.wire.flush()
            for frame in self.wire.hear():
                self._hear(frame)
        if not self.wire.slot_bytes and now > self.deadline_s:
            raise ConnectorError(f"the peer did not answer in {DIAL_TIMEOUT_S:g} s")
        late = [one for one in self.parcels.values() if one.future is None and one.deadline_s < now]
        if late:
            raise ConnectorError(f"the peer did nothing for {ANSWER_TIMEOUT_S:g} s")

    def _begin(self) -> None:
        """The next parcels, those of the transfers in turn."""
        while self.wire.slot_bytes and self.transfers and len(self.parcels) < WINDOW:
            transfer = self.transfers[0]
            found = transfer.next()
            if found is None:
                transfer.is_all_begun = True
                self.transfers.popleft()
                continue
            parcel, number = _Parcel(transfer, *found), next(self.numbers)
            self.parcels[number] = parcel
            transfer.num_under_way += 1
            if transfer.direction is Direction.PUSH:
                parcel.future = self.mover.hold(parcel.src)
            else:
                self._ask(parcel, Store(number, parcel.src.to_bytes()))

    def _flush(self) -> None:
        try:
            if self.is_connected and self.failure is None:
                self.wire.flush()
        except ConnectorError as error:
            self.lose(str(error))

    def _ask(self, parcel: _Parcel, frame: Load | Store) -> None:
        parcel.future = None
        parcel.deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        self.wire.say(frame)

    def _carried(self, number: int, parcel: _Parcel) -> None:
        """A thread of ours is through with it."""
        future, transfer = parcel.future, parcel.transfer
        if future is None:
            return
        error = None if future.cancelled() else future.exception(0)
        if future.cancelled() or error is not None:
            transfer.failure = transfer.failure or str(error or "it was stopped")
        elif transfer.direction is Direction.PUSH:
            held = parcel.held = future.result(0)
            if self.failure is None:
                extents = parcel.dst.to_bytes()
                self._ask(parcel, Load(number, held.tier, held.slot, held.key, extents))
                return
        if transfer.direction is Direction.PULL and self.failure is None:
            self.wire.say(Taken(number))
        self._end(number, parcel)

    def _hear(self, frame: Frame) -> None:
        if isinstance(frame, Welcome):
            return
        parcel = None
        if isinstance(frame, Stored | Loaded | Failed):
            parcel = self.parcels.get(frame.parcel)
        if parcel is None or parcel.future is not None:
            raise ConnectorError(f"the peer sent {type(frame).__name__} out of turn")
        push = parcel.transfer.direction is Direction.PUSH
        if isinstance(frame, Stored) and not push and frame.tier < len(self.wire.tiers):
            tier, slot_bytes = self.wire.tiers[frame.tier], self.wire.slot_bytes
            parcel.future = self.mover.fetch(tier, slot_bytes, frame.slot, frame.key, parcel.dst)
        elif isinstance(frame, Loaded) and push:
            self._end(frame.parcel, parcel)
        elif isinstance(frame, Failed):
            parcel.transfer.failure = parcel.transfer.failure or f"the peer said: {frame.reason}"
            self._end(frame.parcel, parcel)
        else:
            raise ConnectorError(f"the peer sent {type(frame).__name__} out of turn")

    def _end(self, number: int, parcel: _Parcel) -> None:
        if parcel.held is not None:
            self.store.drop(parcel.held)
        del self.parcels[number]
        parcel.transfer.num_under_way -= 1
