"""The contract of a connector: what moves KV between two workers.

A connector owns its transport (an agent, sockets, mappings) and nothing of the cache: its worker
says which ranges are registered. All calls come from the worker's transfer thread, but for the
constructor. Peers are named by the control plane; descriptions travel over it as opaque bytes.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from kvxfer.errors import UsageError
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region


class Direction(enum.StrEnum):
    """Who moves the bytes: the owner of the source (push) or of the destination (pull)."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, slots=True)
class MemoryWindow:
    """The reservation that a connector's offsets are relative to."""

    base_address: int
    size_bytes: int
    device: str
    """torch's name of the device the memory is on."""


@dataclass(frozen=True, slots=True)
class TicketResult:
    """A submitted transfer that ended: `error` is None, or why its bytes must not be used."""

    ticket: int
    error: str | None = None


class Connector(ABC):
    """Register ranges, learn a peer's, move bytes.

    There is no cancel: NIXL cannot stop a transfer that was posted, and its data lands after the
    handle was released. A ticket is polled until it ends, and until then its blocks are in use.
    """

    preferred_layout: ClassVar[str] = ""
    """The layout it moves best, where it makes a difference; the user's word is above it."""

    @abstractmethod
    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        """Create the transport. `agent_name` is unique to this life of the process."""

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """Take, for transfers within `scratch`, what a transport takes of the device for its own
        use when it first moves something. The stack, which the caller closes, gives it back.

        So that it can be measured before the cache takes what is left (our addition to S15).
        Raises ConnectorError. A connector that takes nothing need not override it.
        """
        return ExitStack()

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make committed ranges reachable: all of them, or ConnectorError and none."""

    @abstractmethod
    def deregister(self, regions: Sequence[Region]) -> None:
        """Forget ranges. A peer may still reach them (see the architecture page): only memory
        that no peer can use any more may be unmapped afterwards."""

    @abstractmethod
    def describe(self, regions: Sequence[Region]) -> bytes:
        """What a peer needs to reach this agent and exactly these registered `regions`."""

    @abstractmethod
    def connect(self, peer: str, base_address: int, description: bytes) -> None:
        """Learn a peer's agent, or more regions of one that is known already (additive).

        Regions that a peer revoked are forgotten by `disconnect` and a new `connect`.

        `base_address` is the peer's MemoryWindow's. A damaged description raises ConnectorError
        and changes nothing.
        """

    @abstractmethod
    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        """Start moving `plan`'s bytes and return a ticket; raises ConnectorError, nothing moved.

        On PUSH the plan's sources are local and its destinations the peer's; on PULL the reverse.
        """

    @abstractmethod
    def poll(self) -> list[TicketResult]:
        """Advance everything, peers' requests included, and return the tickets that ended since
        the last call. A completed ticket's bytes are visible at their destination."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; its tickets end with an error. Unknown peers are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport. Idempotent."""


def check_connector(name: str) -> None:
    """Raise UsageError unless connectors/ has a module of this name. Imports nothing."""
    if not name.isidentifier() or importlib.util.find_spec(f"connectors.{name}") is None:
        raise UsageError("connector", name, "no such module in connectors/")


def load_connector(name: str) -> type[Connector]:
    """The connector of the module connectors.<name>, imported only when asked for."""
    check_connector(name)
    found: type[Connector] = importlib.import_module(f"connectors.{name}").CONNECTOR
    return found
