"""One end of a transport, as transports with agents share it: NIXL, and the in-process loopback.

`AgentConnector` makes a `Connector` of it, so the tests of one exercise the bookkeeping of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region


class Agent(ABC):
    """One end of a transport. Every failure is a ConnectorError; handles are opaque."""

    @abstractmethod
    def __init__(self, name: str, memory: MemoryWindow) -> None:
        """Start it. Dropping the last reference ends it, once all below was undone."""

    @abstractmethod
    def register(self, region: Region) -> Any:
        """Make a committed range reachable; the answer is what `deregister` takes."""

    @abstractmethod
    def deregister(self, handle: Any) -> None: ...

    @abstractmethod
    def metadata(self, regions: Sequence[Region]) -> bytes:
        """What `add_peer` of another agent needs to reach these regions, perhaps none."""

    @abstractmethod
    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        """Learn an agent or more of its regions. Changes nothing when it raises."""

    @abstractmethod
    def remove_peer(self, agent: str) -> None:
        """Forget an agent that no transfer uses; an unknown one is ignored."""

    @abstractmethod
    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> Any:
        """Move the runs of a checked plan. Raises only while nothing has moved yet."""

    def warm(self, remote: RemotePeer, regions: Sequence[Region]) -> Any:
        """Start a read of a little of each of the peer's new `regions` into memory of our own that
        nothing else uses: a handle as `start`'s, or None where there is nothing to warm up."""
        return None

    @abstractmethod
    def is_finished(self, handle: Any) -> bool:
        """Whether a transfer succeeded; raises when it ended otherwise.

        Either way the transfer's resources are free then, and its handle is not asked about again.
        """

    @abstractmethod
    def progress(self) -> None:
        """Serve peers' requests."""
