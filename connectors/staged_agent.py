"""A NIXL agent over a staging ring, that also carries messages.

Facts, measured with nixl 1.5.1 on the host, two agents polled in turn:
- Notifications of up to 1 MiB arrive whole; one of 64 KiB is sent in 0.3 ms and there in 0.7.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from connectors.nixl import NixlAgent
from connectors.nixl_api import translated
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.runs import Runs


class StagedAgent(NixlAgent):
    """Knows peers by their rings. Every failure is a ConnectorError."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        super().__init__(name, memory)
        self._received: list[tuple[str, bytes]] = []

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

    def write(self, source: int, remote: RemotePeer, target: int, size_bytes: int) -> Any:
        """Start writing bytes of our ring at offset `source` to offset `target` of a peer's;
        `is_finished` tells when they are there."""
        columns = (source, target, size_bytes)
        runs = Runs(*(np.array([value], dtype=np.int64) for value in columns))
        return self.start(Direction.PUSH, remote, TransferPlan((), given=runs))
