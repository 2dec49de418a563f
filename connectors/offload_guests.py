"""The side of `offload` that is connected to: stores and loads what peers ask for.

Nothing a peer does is trusted: what it asks for is checked, and it is dropped for anything wrong.
Everything here is driven by `advance` and never blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from connectors.handover_socket import HungUp, Listener
from connectors.offload_mover import Mover
from connectors.offload_parcels import Extents
from connectors.offload_store import BlockStore, Held
from connectors.offload_wire import (
    Failed,
    Frame,
    Load,
    Loaded,
    Open,
    Refused,
    Store,
    Stored,
    Taken,
    Welcome,
    Wire,
)
from connectors.peer_export import Invitations
from kvxfer.errors import ConnectorError, TransferError
from kvxfer.transfer.regions import RegionSet

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S: Final = 5.0
SETTLE_TIMEOUT_S: Final = 5.0
MAX_GUESTS: Final = 256
MAX_ASKED: Final = 64
"""Parcels that one guest may have under way, those that it has not taken among them."""
AT_WORK: Final = 4
"""Of those, how many are given to the threads at once."""


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection. `agent` is empty until it has shown an invitation."""

    wire: Wire
    deadline_s: float
    agent: str = ""
    asked: deque[Load | Store] = field(default_factory=deque)
    at_work: dict[int, tuple[Future[Any], bool]] = field(default_factory=dict)
    """By parcel; whether it is being stored."""
    held: dict[int, Held] = field(default_factory=dict)

    @property
    def num_parcels(self) -> int:
        return len(self.asked) + len(self.at_work) + len(self.held)


class Guests:
    """All connections that were made to this end."""

    def __init__(
        self,
        listener: Listener,
        store: BlockStore,
        mover: Mover,
        tiers: Callable[[], list[int]],
        regions: Callable[[], RegionSet],
    ) -> None:
        """`tiers` are the descriptors to hand out; `regions` what peers may reach now."""
        self.invitations = Invitations()
        self._listener = listener
        self._store = store
        self._mover = mover
        self._tiers = tiers
        self._regions = regions
        self._guests: list[_Guest] = []
        self._leaving: list[_Guest] = []
        """Those that are gone, while threads still carry something for them."""

    @property
    def is_busy(self) -> bool:
        return any(guest.num_parcels for guest in self._guests)

    def advance(self) -> None:
        self._accept()
        for guest in list(self._guests):
            try:
                guest.wire.flush()
                for frame in guest.wire.hear():
                    self._hear(guest, frame)
                self._finish(guest)
                self._begin(guest)
                guest.wire.flush()
                if not guest.agent and time.monotonic() > guest.deadline_s:
                    raise ConnectorError(f"showed no invitation in {OPEN_TIMEOUT_S:g} s")
            except HungUp:
                self._drop(guest, "it hung up", warns=guest.num_parcels > 0)
            except ConnectorError as error:
                self._drop(guest, str(error))
        self._release()

    def settle(self) -> None:
        """Wait for what threads carry between the window and slots for peers, or did for some that
        are gone. Raises ConnectorError if that has not ended in 5 s: the window must stay."""
        guests = (*self._guests, *self._leaving)
        carried = [future for guest in guests for future, _ in guest.at_work.values()]
        if wait(carried, SETTLE_TIMEOUT_S).not_done:
            raise ConnectorError(
                f"offload: what peers asked for did not end in {SETTLE_TIMEOUT_S:g} s; "
                f"its memory must stay mapped"
            )

    def forget(self, agent: str) -> None:
        """Hang up on what a peer's agent has connected here."""
        for guest in [one for one in self._guests if one.agent == agent]:
            self._drop(guest, "it was disconnected", warns=False)

    def close(self) -> None:
        """Idempotent. The mover was closed: nothing is under way."""
        for guest in list(self._guests):
            self._drop(guest, "it was closed", warns=False)
        self._listener.close()

    def _accept(self) -> None:
        sock = self._listener.accept()
        if sock is None:
            return
        if len(self._guests) >= MAX_GUESTS:
            sock.close()
            logger.warning("offload: more than %d connections", MAX_GUESTS)
            return
        self._guests.append(_Guest(Wire(sock), time.monotonic() + OPEN_TIMEOUT_S))

    def _hear(self, guest: _Guest, frame: Frame) -> None:
        if isinstance(frame, Open):
            if guest.agent or not self.invitations.redeem(frame.token):
                raise ConnectorError("was not invited, or is too late")
            guest.agent = frame.agent
            guest.wire.say(Welcome(self._store.slot_bytes), self._tiers())
        elif guest.agent and isinstance(frame, Load | Store):
            if guest.num_parcels >= MAX_ASKED:
                raise ConnectorError(f"asked for more than {MAX_ASKED} parcels at once")
            guest.asked.append(frame)
        elif isinstance(frame, Taken) and frame.parcel in guest.held:
            self._store.drop(guest.held.pop(frame.parcel))
        else:
            raise ConnectorError(f"sent {type(frame).__name__} out of turn")

    def _begin(self, guest: _Guest) -> None:
        while guest.asked and len(guest.at_work) < AT_WORK:
            frame = guest.asked.popleft()
            if frame.parcel in guest.at_work or frame.parcel in guest.held:
                raise ConnectorError(f"asked for parcel {frame.parcel} twice")
            try:
                future = self._given(guest, frame)
            except TransferError as error:
                guest.wire.say(Failed(frame.parcel, str(error)[:1024]))
            else:
                guest.at_work[frame.parcel] = future, isinstance(frame, Store)

    def _given(self, guest: _Guest, frame: Load | Store) -> Future[Any]:
        limit = self._store.slot_bytes if isinstance(frame, Store) else guest.wire.slot_bytes
        extents = Extents.from_peer(frame.extents, self._regions(), limit)
        if isinstance(frame, Store):
            return self._mover.hold(extents)
        if frame.tier >= len(guest.wire.tiers):
            raise ConnectorError(f"tier {frame.tier} was not handed over")
        tier = guest.wire.tiers[frame.tier]
        return self._mover.fetch(tier, guest.wire.slot_bytes, frame.slot, frame.key, extents)

    def _finish(self, guest: _Guest) -> None:
        """Answer what was done."""
        for parcel, (future, is_stored) in list(guest.at_work.items()):
            if not future.done():
                continue
            del guest.at_work[parcel]
            try:
                result = future.result(0)
            except ConnectorError as error:
                guest.wire.say(Failed(parcel, str(error)[:1024]))
                continue
            if is_stored:
                guest.held[parcel] = result
                guest.wire.say(Stored(parcel, result.tier, result.slot, result.key))
            else:
                guest.wire.say(Loaded(parcel))

    def _drop(self, guest: _Guest, reason: str, *, warns: bool = True) -> None:
        """Hang up. What the threads were given of it they finish, or never begin."""
        if warns:
            logger.warning("offload: dropped %s: %s", guest.agent or "a stranger", reason)
        with suppress(ConnectorError):  # it is gone already
            guest.wire.say(Refused(reason[:1024]))
            guest.wire.flush()
        guest.wire.hang_up()
        self._guests.remove(guest)
        for held in guest.held.values():
            self._store.drop(held)
        for future, _ in guest.at_work.values():
            future.cancel()
        self._leaving.append(guest)
        self._release()

    def _release(self) -> None:
        """Guests that are gone, once no thread reads their tiers or stores for them."""
        for guest in list(self._leaving):
            if not all(future.done() for future, _ in guest.at_work.values()):
                continue
            self._leaving.remove(guest)
            for future, is_stored in guest.at_work.values():
                if is_stored and not future.cancelled() and future.exception(0) is None:
                    self._store.drop(future.result(0))
            guest.wire.close()
