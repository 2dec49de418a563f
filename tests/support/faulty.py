"""Real drivers and connectors that fail, or stall, when a test says so."""

from __future__ import annotations

import threading
from typing import Any

from connectors.loopback import LoopbackConnector
from kvxfer.errors import ConnectorError, OutOfMemory
from kvxfer.memory.driver import MemoryInfo
from kvxfer.memory.host import HostDriver
from kvxfer.transfer.connector import MemoryWindow, TicketResult


class FaultyDriver(HostDriver):
    """Host memory that runs out: while `fail_after` is n >= 0, n more commits succeed, and where
    `free_bytes` is set, so much is all that there seems to be."""

    fail_after = -1
    num_refused = 0
    free_bytes: int | None = None

    def memory_info(self) -> MemoryInfo:
        found = super().memory_info()
        return found if self.free_bytes is None else MemoryInfo(self.free_bytes, found.total_bytes)

    def commit(self, address: int, size_bytes: int) -> int:
        if self.fail_after == 0:
            self.num_refused += 1
            raise OutOfMemory("commit", 12, size_bytes, 0)
        self.fail_after -= self.fail_after > 0
        return super().commit(address, size_bytes)


class SlowLoopback(LoopbackConnector):
    """A transport that a test can stall, or have refuse.

    While `moving` is clear, nothing moves and no ticket ends; `refuse` holds names of methods that
    raise ConnectorError.
    """

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        super().__init__(agent_name, memory)
        self.moving = threading.Event()
        self.moving.set()
        self.refuse: set[str] = set()
        self.num_submitted = 0

    def register(self, regions: Any) -> None:
        self._check("register")
        super().register(regions)

    def describe(self, regions: Any) -> bytes:
        self._check("describe")
        return super().describe(regions)

    def revoke(self, left: Any, epoch: int) -> bytes:
        self._check("revoke")
        return super().revoke(left, epoch)

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        self._check("connect")
        super().connect(peer, base_address, description, invitation)

    def submit(self, peer: str, direction: Any, plan: Any) -> int:
        self._check("submit")
        self.num_submitted += 1
        return super().submit(peer, direction, plan)

    def poll(self) -> list[TicketResult]:
        return super().poll() if self.moving.is_set() else []

    def close(self) -> None:
        self.moving.set()
        self._check("close")
        super().close()

    def _check(self, name: str) -> None:
        if name in self.refuse:
            raise ConnectorError(f"{name} is refused")
