"""A `peer` connector of this process over host memory, and how the tests poll it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
from support.peer_process import plan_of

from connectors.peer import PeerConnector
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Direction, MemoryWindow, TicketResult
from kvxfer.transfer.regions import Region

TIMEOUT_S = 20.0


class PeerSide(AbstractContextManager["PeerSide"]):
    """Closed in the end: connector, then memory."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.buffer = VirtualBuffer(HostDriver(), size_bytes)
        self.base = self.buffer.base_address
        window = MemoryWindow(self.base, size_bytes, "cpu", self.buffer)
        self.connector = PeerConnector(name, window)

    def grow(self, *ranges: tuple[int, int]) -> list[Region]:
        chunks = [chunk for one in ranges for chunk in self.buffer.commit([one])]
        regions = [Region(chunk.offset, chunk.size) for chunk in chunks]
        self.connector.register(regions)
        return regions

    def bytes(self, offset: int, size: int) -> np.ndarray:
        raw = (ctypes.c_uint8 * size).from_address(self.base + offset)
        return np.ctypeslib.as_array(raw)

    def start(self, peer: str, *runs: Sequence[int]) -> int:
        return self.connector.submit(peer, Direction.PULL, plan_of([list(run) for run in runs]))

    def finish(self, ticket: int, meanwhile: Callable[[], object] = lambda: None) -> TicketResult:
        """Poll until `ticket` ends, alone."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            meanwhile()
            for result in self.connector.poll():
                assert result.ticket == ticket
                return result
            time.sleep(0.0002)
        raise TimeoutError(f"ticket {ticket} did not end")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.connector.close()
        self.buffer.close()


def pull_from(owner: PeerSide, side: PeerSide) -> None:
    """That all is well between two others: the owner's first chunk is full of sevens."""
    regions = owner.connector._regions.regions
    told = owner.connector.describe(regions), owner.connector.invite()
    side.connector.connect("owner", owner.base, *told)
    region = regions[0]
    side.bytes(region.offset, region.size)[:] = 0
    ticket = side.start("owner", (region.offset, region.offset, region.size))
    assert side.finish(ticket, owner.connector.poll).error is None
    assert (side.bytes(region.offset, region.size) == 7).all()
