"""The contract of a connector: what moves KV between two workers.

A connector owns its transport (an agent, sockets, mappings) and nothing of the cache: its worker
says which ranges are registered. All calls come from the worker's transfer thread, but for the
constructor and `invite`. Peers are named by the control plane; descriptions and invitations travel
over it as opaque bytes.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from kvxfer.errors import UsageError
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region


class Direction(enum.StrEnum):
    """Who moves the bytes: the owner of the source (push) or of the destination (pull)."""

    PUSH = "push"
    PULL = "pull"


DATA_ADDRESS = "KVXFER_DATA_ADDRESS"
"""Environment variable: the IP address by whose interface KV leaves and comes, where a connector
has to choose one; a worker's default is that which others dial."""


class Where(enum.StrEnum):
    """Where a peer is."""

    HOST = "host"
    """On the same one."""
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class MemoryWindow:
    """The reservation that a connector's offsets are relative to."""

    base_address: int
    size_bytes: int
    device: str
    """torch's name of the device the memory is on."""
    buffer: VirtualBuffer | None = None
    """Whose chunks the regions are, each of the same offset and size; None for memory of another
    kind, which no other process can map."""


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
    directions: ClassVar[frozenset[Direction]] = frozenset(Direction)
    """Who may start a transfer."""
    initiates: Direction | None = None
    """What its worker starts, as a rule; None: either."""
    expects: frozenset[Direction] = frozenset(Direction)
    """What may be started by either side."""

    @abstractmethod
    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        """Create the transport. `agent_name` is unique to this life of the process."""

    @classmethod
    def why_missing(cls) -> str:
        """Why it cannot work in this process, with what to install, in one line; '' where it can.
        May load the transport's library."""
        return ""

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

    def revoke(self, left: Sequence[Region], epoch: int) -> bytes:
        """The description that peers are to `renew` by, of the registered regions that stay: all
        others are about to be deregistered. `epoch` is a number above all before it.

        What was described earlier serves peers until `retire`. ConnectorError changes nothing.
        """
        return self.describe(left)

    def retire(self, kept: Collection[int]) -> None:  # noqa: B027
        """Nobody uses what was described before the newest `revoke` any more, but for what was in
        the epochs `kept`: by a peer that was told of it, has not renewed, and may still live.

        Giving an epoch up too early may end this process under a peer's transfer.
        """

    @property
    def reads_from(self) -> frozenset[Where]:
        """Where peers are whose memory is read without work of theirs: elsewhere a reader that dies
        may take them along, and no lane is a pull unless the user asks for one. Any thread."""
        return frozenset(Where)

    @property
    def wear(self) -> int:
        """Peers that were lost, or could not be reached, in this epoch: so many connections may be
        kept of which nobody has any use, until another one. Any thread may ask."""
        return 0

    def invite(self) -> bytes:
        """A one-time right to connect to us, for one Hello; b"" where none is asked for.

        Any thread may call it.
        """
        return b""

    @abstractmethod
    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """Learn a peer's agent, or more regions of one that is known already (additive).

        `base_address` is the peer's MemoryWindow's, `invitation` what its `invite` said. A damaged
        description raises ConnectorError and changes nothing.
        """

    def renew(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        """`peer` revoked regions: forget all but what `description` names.

        No transfer of ours with it is under way. When this returns, or raises, nothing here can
        touch what was revoked: its owner unmaps it next.
        """
        self.disconnect(peer)
        self.connect(peer, base_address, description, invitation)

    @abstractmethod
    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        """Start moving `plan`'s bytes and return a ticket; raises ConnectorError, nothing moved.

        On PUSH the plan's sources are local and its destinations the peer's; on PULL the reverse.
        """

    @abstractmethod
    def poll(self) -> list[TicketResult]:
        """Advance everything, peers' requests included, and return the tickets that ended since
        the last call. A completed ticket's bytes are visible at their destination."""

    @property
    def is_busy(self) -> bool:
        """Whether peers wait for this end to be polled often, though no ticket of ours is open."""
        return False

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; its tickets end with an error. Unknown peers are ignored."""

    def is_leaving(self, agent: str) -> bool:
        """Whether something is still under way with the agent of a peer that was disconnected;
        `poll` brings it to its end."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the transport. Idempotent."""


def check_connectors(names: str) -> list[str]:
    """The names in a comma-separated list. Raises UsageError unless connectors/ has a module for
    each, named once. Imports nothing."""
    found = [name.strip() for name in names.split(",")]
    for name in found:
        if not name.isidentifier() or importlib.util.find_spec(f"connectors.{name}") is None:
            raise UsageError("connector", name, "no such module in connectors/")
    if len(set(found)) != len(found):
        raise UsageError("connector", names, "names a connector twice")
    return found


def find_connector(name: str) -> type[Connector]:
    """The connector of the module connectors.<name>, imported only when asked for."""
    check_connectors(name)
    found: type[Connector] | None = getattr(
        importlib.import_module(f"connectors.{name}"), "CONNECTOR", None
    )
    if found is None:
        raise UsageError("connector", name, "that module of connectors/ is no connector")
    return found


def load_connector(name: str) -> type[Connector]:
    """One that can work here: UsageError, too, where what it needs is not installed."""
    found = find_connector(name)
    if reason := found.why_missing():
        raise UsageError("connector", name, reason)
    return found


def load_connectors(names: str) -> dict[str, type[Connector]]:
    """The connectors of a comma-separated list, by name."""
    return {name: load_connector(name) for name in check_connectors(names)}


def clear_up_after_killed() -> None:
    """Remove what processes that were killed left of connectors in this host's file system, which
    else waits for the next one that starts: the sockets of `peer`. Raises ConnectorError."""
    importlib.import_module("connectors.handover_socket").remove_dead_sockets()
