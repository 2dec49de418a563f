"""A NIXL agent over a staging ring, that also carries messages.

Facts, measured with nixl 1.5.1 on the host, two agents polled in turn:
- Notifications of up to 1 MiB arrive whole; one of 64 KiB is sent in 0.3 ms and there in 0.7.
- A handle that is DONE is posted again as it is; making it takes as long as posting does, or more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from connectors.nixl import NixlAgent
from connectors.nixl_api import descriptors, translated
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.reach import RemotePeer

MAX_IDLE: Final = 1024
"""Handles that are kept to be posted again; the one that was not used for longest goes first."""

Way = tuple[str, int, int]
"""(agent, source, target): from a slot of ours to one of a peer's, as offsets in the rings."""


@dataclass(slots=True, eq=False)
class Write:
    """A handle that was posted, and what posting it said."""

    way: Way
    size_bytes: int
    handle: Any
    state: str = ""
    failure: ConnectorError | None = None


class StagedAgent(NixlAgent):
    """Knows peers by their rings. Every failure is a ConnectorError."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        super().__init__(name, memory)
        self._received: list[tuple[str, bytes]] = []
        self._idle: OrderedDict[Way, Write] = OrderedDict()
        """Ended well, to be posted again. A slot has one owner at a time, so a way has too."""

    def progress(self) -> None:
        with translated("get_new_notifs"):
            found: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        for name, messages in found.items():
            agent = name.decode() if isinstance(name, bytes) else name
            self._received += [(agent, message) for message in messages]

    def notify(self, agent: str, message: bytes) -> None:
        """Send `message` to a peer's agent."""
        with translated(f"send_notif to {agent}"):
            self._agent.send_notif(agent, message)

    def received(self) -> list[tuple[str, bytes]]:
        """(agent, message) that came until the last `progress`, each once."""
        found, self._received = self._received, []
        return found

    def remove_peer(self, agent: str) -> None:
        self._forget(agent)
        super().remove_peer(agent)

    def write(self, source: int, remote: RemotePeer, target: int, size_bytes: int) -> Write:
        """Start writing bytes of our ring at offset `source` to offset `target` of a peer's;
        `is_written` tells when they are there, and whether posting it went wrong."""
        way = remote.agent, source, target
        write = self._idle.pop(way, None)
        if write is not None and write.size_bytes != size_bytes:
            self._free(write)
            write = None
        if write is None:
            write = Write(way, size_bytes, self._make(source, remote, target, size_bytes))
        try:
            with translated("transfer of a slot"):
                write.state = self._agent.transfer(write.handle)
        except ConnectorError as failure:
            write.failure = failure  # some bytes may have moved
        return write

    def is_written(self, write: Write) -> bool:
        """Asked until it answers True or raises ConnectorError, and not again."""
        try:
            if write.failure is not None:
                raise write.failure
            if write.state == "PROC":
                with translated("check_xfer_state"):
                    write.state = self._agent.check_xfer_state(write.handle)
            if write.state not in ("DONE", "PROC"):
                raise ConnectorError(f"NIXL ended a transfer in state {write.state}")
        except ConnectorError:
            self._forget(write.way[0])  # NIXL may have dropped what they refer to
            self._free(write)
            raise
        if write.state == "PROC":
            return False
        self._idle[write.way] = write
        if len(self._idle) > MAX_IDLE:
            self._free(self._idle.popitem(last=False)[1])
        return True

    def _make(self, source: int, remote: RemotePeer, target: int, size_bytes: int) -> Any:
        size = np.array([size_bytes], dtype=np.int64)
        ours, theirs = (np.array([one], dtype=np.int64) for one in (source, target))
        local = descriptors(self._memory.base_address, ours, size, self._memory.device)
        far = descriptors(remote.base_address, theirs, size, remote.device)
        return self._from_rows("WRITE", remote, local, far).handle

    def _forget(self, agent: str) -> None:
        """What is kept for a peer's agent goes; none of it is under way."""
        for way in [way for way in self._idle if way[0] == agent]:
            self._free(self._idle.pop(way))

    def _free(self, write: Write) -> None:
        with translated("release_xfer_handle"):
            self._agent.release_xfer_handle(write.handle)
