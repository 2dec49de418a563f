"""Both sides of `offload` in one process, and the tiers that it has."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec

from connectors.handover_socket import Listener, socket_directory
from connectors.offload_guests import Guests
from connectors.offload_link import Link, Transfer
from connectors.offload_mover import Mover
from connectors.offload_parcels import Extents, parcels_of
from connectors.offload_tiers import open_tiers
from connectors.offload_wire import Open
from kvxfer.errors import ConnectorError, OutOfReach, UsageError
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.connector import Direction, MemoryWindow, Where
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region, RegionSet

logger = logging.getLogger(__name__)


class _Reach(msgspec.Struct, frozen=True):
    """What a description says beside its regions."""

    socket_name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


@dataclass(slots=True, eq=False)
class BlocksMoved:
    """Blocks on their way to the store or from it."""

    left: dict[bytes, Future[bool]]
    what: str

    def is_finished(self) -> bool:
        """Raises ConnectorError when all ended, and some were missing."""
        if not all(future.done() for future in self.left.values()):
            return False
        for key, future in self.left.items():
            if future.cancelled() or not future.result(0):
                raise ConnectorError(f"block {key.hex()} {self.what}")
        return True


class OffloadAgent(Agent):
    """A store, threads that carry blocks, guests, and a link to each peer."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        if memory.device != "cpu":
            raise UsageError("device", memory.device, "offload stores host memory only")
        self._name = name
        self._registered: set[Region] = set()
        self._links: dict[str, Link] = {}
        self._lost: list[Link] = []
        """Hung up, while threads still carry something of theirs."""
        self._invitation = b""
        self._is_closed = False
        self._directory = socket_directory()
        with ExitStack() as undo:
            self.store = open_tiers()
            undo.callback(self.store.close)
            self._mover = Mover(self.store, memory.base_address)
            undo.callback(self._mover.close)
            listener = Listener(self._directory)
            self._reach = msgspec.msgpack.encode(_Reach(listener.name))
            self.guests = Guests(listener, self.store, self._mover, self._tier_fds, self._reachable)
            undo.pop_all()

    @property
    def is_busy(self) -> bool:
        return self.guests.is_busy

    def register(self, region: Region) -> Region:
        self._registered.add(region)
        return region

    def deregister(self, handle: Region) -> None:
        """Also waits: threads of ours, which peers do not know of, may be copying for them."""
        self._registered.remove(handle)
        self.guests.settle()

    def metadata(self, regions: Sequence[Region]) -> bytes:
        return self._reach

    @contextmanager
    def invited_with(self, invitation: bytes) -> Iterator[None]:
        """Meanwhile, `add_peer` may connect to a new peer."""
        self._invitation = invitation
        try:
            yield
        finally:
            self._invitation = b""

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        try:
            reach = msgspec.msgpack.decode(metadata, type=_Reach)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConnectorError(f"offload description of {remote.agent}: {error}") from error
        if remote.where is not Where.HOST:
            raise OutOfReach(f"agent {remote.agent} is on another host: {remote.host}")
        link = self._links.get(remote.agent)
        if link is not None and link.failure is None:
            return
        if not self._invitation:
            raise ConnectorError(f"agent {remote.agent} is not connected and gave no invitation")
        opening = Open(self._invitation, self._name, self.store.slot_bytes)
        new = Link.dial(
            self._directory, reach.socket_name, opening, self.store, self._mover, self._tier_fds()
        )
        self.lose(remote.agent, "it was connected anew")
        self._links[remote.agent] = new

    def has_lost(self, agent: str) -> bool:
        link = self._links.get(agent)
        return link is not None and link.failure is not None

    def lose(self, agent: str, reason: str) -> None:
        """Hang up on an agent; its transfers end when nothing of theirs is carried any more."""
        link = self._links.pop(agent, None)
        if link is not None:
            link.lose(reason)
            self._lost.append(link)
            self._release()

    def remove_peer(self, agent: str) -> None:
        self.lose(agent, "it was removed")

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> Transfer:
        link = self._links.get(remote.agent)
        if link is None or link.failure is not None:
            reason = "it is not connected" if link is None else link.failure
            raise ConnectorError(f"agent {remote.agent}: {reason}")

        def parcels() -> Iterator[tuple[Extents, Extents]]:
            """Asked for once the peer has said how large its slots are."""
            whose = self.store if direction is Direction.PUSH else link.wire
            return parcels_of(plan.runs, whose.slot_bytes)

        return link.start(Transfer(direction, parcels))

    def start_storing(self, blocks: Mapping[bytes, Extents]) -> BlocksMoved:
        """Keep each block's bytes under its key."""
        begun = {key: self._mover.put(key, extents) for key, extents in blocks.items()}
        return BlocksMoved(begun, "could not be kept")

    def start_loading(self, blocks: Mapping[bytes, Extents]) -> BlocksMoved:
        """Bring each block's bytes to the window, those that are there."""
        begun = {key: self._mover.get(key, extents) for key, extents in blocks.items()}
        return BlocksMoved(begun, "is not in the tiers")

    def is_finished(self, handle: Transfer | BlocksMoved) -> bool:
        return handle.is_finished()

    def progress(self) -> None:
        """For all peers, those that connected to us included."""
        self.guests.advance()
        for link in list(self._links.values()):
            link.advance()
        self._release()

    def close(self) -> None:
        """Hang up on everybody, wait for what is being carried, flush the tiers. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as release:
            release.callback(self.store.close)
            release.callback(self._release)
            release.callback(self.guests.close)
            release.callback(self._mover.close)
            for agent in list(self._links):
                self.lose(agent, "it was closed")

    def _release(self) -> None:
        """What is left of lost links, once nothing is carried for them."""
        for link in list(self._lost):
            link.advance()
            if link.is_at_rest:
                self._lost.remove(link)
                link.close()

    def _tier_fds(self) -> list[int]:
        return [tier.file.shared_fd for tier in self.store.tiers]

    def _reachable(self) -> RegionSet:
        return RegionSet(tuple(sorted(self._registered)))
