"""Both sides of `peer` in one process: what it hands out, what it has mapped, what it copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from connectors.handover_socket import socket_directory
from connectors.peer_copy import HostCopier, copier_for
from connectors.peer_export import Exporter
from connectors.peer_import import BUSY_TURN_S, TURN_S, Link, Reach
from kvxfer.errors import ConnectorError, OutOfReach
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region

logger = logging.getLogger(__name__)

MAP_TIMEOUT_S = 10.0
"""How long a transfer waits for chunks that were described and have not been handed over."""
LOOK_PAUSE_S = 0.0005
"""Between looks at the sockets, while a device copies."""


@dataclass(slots=True)
class _Pull:
    """A started transfer; `copy` is the copier's, None while chunks are awaited."""

    link: Link
    plan: TransferPlan
    awaited: set[int]
    deadline: float
    copy: Any = None
    failure: ConnectorError | None = None


class PeerAgent(Agent):
    """An exporter of our chunks and a link to each owner."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        self._name = name
        self._base_address = memory.base_address
        self._host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.copier = copier_for(memory.device)
        self._directory = socket_directory()
        self.exporter = Exporter(memory, self._directory)
        self._buffer = self.exporter.buffer
        self._serials: dict[Region, int] = {}
        self._next_serial = count()
        self._links: dict[str, Link] = {}
        self._lost: list[Link] = []
        """Hung up, and mapped until their copies have ended."""
        self._stuck: list[Link] = []
        """Lost, and the driver refused to unmap them."""
        self._invitation = b""
        self._next_look_s = 0.0

    def register(self, region: Region) -> Region:
        serial = next(self._next_serial)
        self.exporter.add(serial, region)
        self._serials[region] = serial
        return region

    def deregister(self, handle: Region) -> None:
        self.exporter.remove(self._serials.pop(handle))

    def metadata(self, regions: Sequence[Region]) -> bytes:
        reach = Reach(
            host=self._host,
            place=self.copier.place,
            socket_name=self.exporter.socket_name,
            size_bytes=self._buffer.size_bytes,
            granularity=self._buffer.driver.granularity,
            chunks=[(self._serials[region], region.offset, region.size) for region in regions],
        )
        return msgspec.msgpack.encode(reach)

    @contextmanager
    def invited_with(self, invitation: bytes) -> Iterator[None]:
        """Meanwhile, `add_peer` may connect to a new owner."""
        self._invitation = invitation
        try:
            yield
        finally:
            self._invitation = b""

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        reach = self._checked(Reach.of(metadata, remote), remote)
        link = self._links.get(remote.agent)
        if link is not None and link.failure is None:
            link.describe(reach)
            return
        if not self._invitation:
            raise ConnectorError(f"agent {remote.agent} is not connected and gave no invitation")
        driver = self._buffer.driver
        new = Link(driver, reach, self._directory, self._invitation, self._name)
        with ExitStack() as undo:
            undo.callback(new.release)
            undo.callback(new.lose, "it was never described")
            new.describe(reach)
            undo.pop_all()
        self.lose(remote.agent, "it was connected anew")
        self._links[remote.agent] = new

    def renew_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        """Unmap what `metadata` does not name. When it raises, the link is to be lost."""
        self._link_to(remote.agent).renew(self._checked(Reach.of(metadata, remote), remote))

    def has_lost(self, agent: str) -> bool:
        link = self._links.get(agent)
        return link is not None and link.failure is not None

    def lose(self, agent: str, reason: str) -> None:
        """Hang up on an agent. What waits for its chunks ends, and its pages go when the copies
        under way have ended."""
        link = self._links.pop(agent, None)
        if link is not None:
            link.lose(reason)
            self._lost.append(link)
            self._release_lost()

    def remove_peer(self, agent: str) -> None:
        self.lose(agent, "it was removed")

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> _Pull:
        link = self._link_to(remote.agent)
        awaited = link.awaited(plan.boxes, remote.regions)
        pull = _Pull(link, plan, awaited, time.monotonic() + MAP_TIMEOUT_S)
        if not awaited:
            self._begin(pull)
        return pull

    def is_finished(self, handle: _Pull) -> bool:
        link = handle.link
        if handle.copy is None and not self._has_begun(handle):
            return False
        try:
            if link.failure is None:
                done = self.copier.is_finished(handle.copy)
            else:
                done = self.copier.is_at_rest(handle.copy)
        except ConnectorError:
            self._leave(link)
            raise
        if not done:
            return False
        self._leave(link)
        if link.failure is not None:
            raise ConnectorError(f"the connection to the owner was lost: {link.failure}")
        return True

    def progress(self) -> None:
        self.copier.begin_turn()
        now = time.monotonic()
        if now < self._next_look_s and self.copier.has_own_turns:
            return  # a copy on a device is asked about often, and sockets cost more than that
        self._next_look_s = now + LOOK_PAUSE_S
        self.exporter.advance()
        links = self._links.values()
        turn_s = BUSY_TURN_S if any(link.users for link in links) else TURN_S
        for link in links:
            link.advance(turn_s)
        self._release_lost()

    def close(self) -> None:
        """Raises ConnectorError when something must stay mapped."""
        self.exporter.close()
        for agent in list(self._links):
            self.lose(agent, "it was closed")
        if self._lost or self._stuck:
            count = len(self._lost) + len(self._stuck)
            raise ConnectorError(f"agent {self._name}: memory of {count} peers stays mapped")

    def _has_begun(self, pull: _Pull) -> bool:
        """Whether all is mapped, and the copy started; raises when it never will be."""
        if pull.failure is not None:
            raise pull.failure
        if pull.link.failure is not None:
            raise ConnectorError(f"the connection to the owner was lost: {pull.link.failure}")
        if pull.link.has_mapped(pull.awaited):
            self._begin(pull)
        elif time.monotonic() > pull.deadline:
            missing = len(pull.awaited)
            raise ConnectorError(
                f"the owner did not hand over {missing} chunks in {MAP_TIMEOUT_S:g} s"
            )
        return pull.copy is not None

    def _begin(self, pull: _Pull) -> None:
        link = pull.link
        bases = link.base_address, self._base_address
        try:
            pull.copy = self.copier.start(pull.plan.boxes, *bases, link.reach.place)
        except ConnectorError as error:
            pull.failure = error  # `is_finished` tells: some bytes may have moved
        else:
            link.users += 1

    def _leave(self, link: Link) -> None:
        """A copy over it has ended."""
        link.users -= 1
        if link.failure is not None:
            self._release_lost()

    def _link_to(self, agent: str) -> Link:
        link = self._links.get(agent)
        if link is None or link.failure is not None:
            reason = "it is not connected" if link is None else link.failure
            raise ConnectorError(f"agent {agent}: {reason}")
        return link

    def _release_lost(self) -> None:
        for link in (*self._links.values(), *self._lost):
            if link.failure is None or link.users or link in self._stuck:
                continue
            try:
                link.release()
            except ConnectorError as error:
                logger.error("memory stays mapped: %s", error)
                self._stuck.append(link)
        self._lost = [link for link in self._lost if link.users]

    def _checked(self, reach: Reach, remote: RemotePeer) -> Reach:
        """Raises ConnectorError for memory that cannot be mapped here."""
        granularity = self._buffer.driver.granularity
        if reach.host != self._host:
            raise OutOfReach(f"agent {remote.agent} is on another host: {reach.host}")
        if (reach.place == HostCopier.place) != (self.copier.place == HostCopier.place):
            raise ConnectorError(f"agent {remote.agent}: device {remote.device} is not of our kind")
        if reach.granularity % granularity or reach.size_bytes % reach.granularity:
            raise ConnectorError(
                f"agent {remote.agent}: {reach.size_bytes} bytes in granules of "
                f"{reach.granularity} do not fit ours of {granularity}"
            )
        return reach
